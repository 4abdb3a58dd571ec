# The operator.
#   docker build -f docker/operator.Dockerfile -t baton-operator:0.1.0 .
ARG BASE=python:3.11.14-slim-bookworm
FROM $BASE AS dependencies
WORKDIR /source
# The environment has no pip: the pip of the base image installs into it.
RUN python -m venv --without-pip /opt/baton
ENV PATH=/opt/baton/bin:$PATH
# Dependencies before Baton: a change of the code then makes a layer of megabytes.
COPY docker/locks/operator.txt ./
RUN pip --python /opt/baton install --no-cache-dir --no-deps --require-hashes -r operator.txt

FROM dependencies AS package
COPY pyproject.toml README.md LICENSE docker/locks/build.txt ./
COPY operator operator
COPY engine/baton_protocol engine/baton_protocol
# In a folder of its own, so that the last stage can copy Baton without its dependencies.
RUN pip --python /opt/baton install --no-cache-dir --no-deps --require-hashes -r build.txt \
    && pip --python /opt/baton install --no-cache-dir --no-deps --no-build-isolation --root /package . \
    && cd /package/opt/baton/bin && rm baton baton-coordinator baton-engine baton-gateway baton-model

FROM $BASE
COPY --from=dependencies /opt/baton /opt/baton
COPY --from=package /package/opt/baton /opt/baton
# HOME: the user has no entry in /etc/passwd, and the Kubernetes client reads it.
ENV PATH=/opt/baton/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp
# A number, because Kubernetes can verify runAsNonRoot only for numeric users.
USER 65532:65532
ENTRYPOINT ["baton-operator"]
