# Engine, coordinator and gateway for machines without a GPU. All pods of a service use one `spec.image`.
#   docker build -f docker/engine-cpu.Dockerfile -t baton:0.1.0-cpu .
ARG BASE=python:3.11.14-slim-bookworm
FROM $BASE AS dependencies
# This index has torch without CUDA.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
WORKDIR /source
# The environment has no pip: the pip of the base image installs into it.
RUN python -m venv --without-pip /opt/baton
ENV PATH=/opt/baton/bin:$PATH
# Dependencies before Baton: a change of the code then makes a layer of megabytes. torch comes from its index alone,
# and the lock has the packages that it needs.
COPY constraints.txt docker/locks/engine-cpu.txt ./
RUN pip --python /opt/baton install --no-cache-dir --no-deps --index-url "$TORCH_INDEX" "$(grep '^torch==' constraints.txt)" \
    && pip --python /opt/baton install --no-cache-dir --no-deps --require-hashes -r engine-cpu.txt

FROM dependencies AS package
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY pyproject.toml README.md LICENSE docker/locks/build.txt ./
COPY engine engine
COPY gateway gateway
COPY kernels kernels
COPY kv_transfer kv_transfer
COPY operator/baton_kube operator/baton_kube
# In a folder of its own, so that the last stage can copy Baton without its dependencies.
RUN pip --python /opt/baton install --no-cache-dir --no-deps --require-hashes -r build.txt \
    && pip --python /opt/baton install --no-cache-dir --no-deps --no-build-isolation --root /package . \
    && cd /package/opt/baton/bin && rm baton baton-operator
# Compiles the CPU kernels for every instruction set; the processor that runs the image selects one. The engine is
# slower without compiled kernels, so a missing file fails the build here.
RUN cd /package/opt/baton/lib/python3.11/site-packages && python -m baton_kernels.cpu.build \
    && ls baton_kernels/cpu/built/*.so

# No compiler at run time: torch.compile on a CPU (off by default) would need one.
FROM $BASE
COPY --from=dependencies /opt/baton /opt/baton
COPY --from=package /package/opt/baton /opt/baton
# HOME and USER: the user has no entry in /etc/passwd, and torch reads both.
ENV PATH=/opt/baton/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp USER=baton
# A number, because Kubernetes can verify runAsNonRoot only for numeric users.
USER 65532:65532
ENTRYPOINT ["baton-engine"]
