# Engine, coordinator and gateway for NVIDIA GPUs. All pods of a service use one `spec.image`, also those without
# a GPU.
#   docker build -f docker/engine-cuda.Dockerfile -t baton:0.1.0 .
# torch's wheels contain CUDA's libraries and the node has the driver, so the base image has no CUDA. torch is built
# for CUDA 12, because UCX's wheels need CUDA 12.
ARG BASE=python:3.11.14-slim-bookworm
FROM $BASE AS dependencies
ARG TORCH_INDEX=https://download.pytorch.org/whl/cu126
WORKDIR /source
# The environment has no pip: the pip of the base image installs into it.
RUN python -m venv --without-pip /opt/baton
ENV PATH=/opt/baton/bin:$PATH
# Dependencies before Baton: a change of the code then makes a layer of megabytes. torch comes from its index alone,
# with its own versions of Triton and of CUDA's libraries. The lock replaces its other dependencies.
COPY constraints.txt docker/locks/engine-cuda.txt docker/link_nixl_ucx.py ./
RUN pip --python /opt/baton install --no-cache-dir --index-url "$TORCH_INDEX" "$(grep '^torch==' constraints.txt)" \
    && pip --python /opt/baton install --no-cache-dir --no-deps --require-hashes -r engine-cuda.txt
# The wheel libucx-cu12 has no verbs and so no RDMA. The UCX in NIXL's wheel has both.
RUN python link_nixl_ucx.py /opt/baton/ucx

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

FROM $BASE
# Triton compiles its launcher (triton/backends/nvidia/driver.c) with the C compiler of the machine that runs it.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
COPY --from=dependencies /opt/baton /opt/baton
COPY --from=package /package/opt/baton /opt/baton
# utility: libnvidia-ml, which UCX's CUDA module links. HOME and USER: the user has no entry in /etc/passwd, and torch
# reads both.
ENV PATH=/opt/baton/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 NVIDIA_DRIVER_CAPABILITIES=compute,utility HOME=/tmp USER=baton
# ucxx loads the UCX in this folder instead of the wheel. The engine logs which one it loaded.
ENV RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY=1 LD_LIBRARY_PATH=/opt/baton/ucx
# A number, because Kubernetes can verify runAsNonRoot only for numeric users.
USER 65532:65532
ENTRYPOINT ["baton-engine"]
