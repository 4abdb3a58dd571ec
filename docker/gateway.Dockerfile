# The gateway alone, for `gateway.template`. The engine images contain it as well, because all pods of a service use
# one `spec.image`.
#   docker build -f docker/gateway.Dockerfile -t baton-gateway:0.1.0 .
ARG BASE=python:3.11.14-slim-bookworm
FROM $BASE AS dependencies
WORKDIR /source
# The environment has no pip: the pip of the base image installs into it.
RUN python -m venv --without-pip /opt/baton
ENV PATH=/opt/baton/bin:$PATH
# Dependencies before Baton: a change of the code then makes a layer of megabytes.
COPY docker/locks/gateway.txt ./
RUN pip --python /opt/baton install --no-cache-dir --no-deps --require-hashes -r gateway.txt

FROM dependencies AS package
COPY pyproject.toml README.md LICENSE docker/locks/build.txt ./
COPY gateway gateway
COPY engine/baton_protocol engine/baton_protocol
COPY engine/baton_text engine/baton_text
COPY operator/baton_kube operator/baton_kube
# The command baton-model, which fetches the tokenizer.
COPY engine/baton_engine/__init__.py engine/baton_engine/bounded_log.py engine/baton_engine/
COPY engine/baton_engine/fetch engine/baton_engine/fetch
COPY engine/baton_engine/http engine/baton_engine/http
# In a folder of its own, so that the last stage can copy Baton without its dependencies.
RUN pip --python /opt/baton install --no-cache-dir --no-deps --require-hashes -r build.txt \
    && pip --python /opt/baton install --no-cache-dir --no-deps --no-build-isolation --root /package . \
    && cd /package/opt/baton/bin && rm baton baton-coordinator baton-engine baton-operator

FROM $BASE
COPY --from=dependencies /opt/baton /opt/baton
COPY --from=package /package/opt/baton /opt/baton
# HOME: the user has no entry in /etc/passwd, and the Kubernetes client reads it.
ENV PATH=/opt/baton/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp
# A number, because Kubernetes can verify runAsNonRoot only for numeric users.
USER 65532:65532
ENTRYPOINT ["baton-gateway"]
