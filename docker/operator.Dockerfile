# The operator.
#   docker build -f docker/operator.Dockerfile -t baton-operator:0.1.0 .
FROM python:3.11.14-slim-bookworm AS dependencies
WORKDIR /source
RUN python -m venv /opt/baton
ENV PATH=/opt/baton/bin:$PATH
COPY pyproject.toml constraints.txt ./
COPY docker/requirements.py docker/
RUN python docker/requirements.py operator > requirements.txt \
    && pip install --no-cache-dir -c constraints.txt -r requirements.txt

FROM dependencies AS package
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.11.14-slim-bookworm
COPY --from=dependencies /opt/baton /opt/baton
ENV PATH=/opt/baton/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
RUN --mount=type=bind,from=package,source=/wheels,target=/wheels \
    pip install --no-cache-dir --no-deps /wheels/*.whl
# A number, because Kubernetes can verify runAsNonRoot only for numeric users.
USER 65532:65532
ENTRYPOINT ["baton-operator"]
