# The image of the sidecar. Plain Dockerfile syntax, so that docker, podman and buildah all build it:
#
#   docker build -t forestage .                              without torch: all but pinning for CUDA, about a tenth of the size
#   docker build -t forestage --build-arg EXTRA=service .    with torch, for pool.pin = "cuda"
#
# BASE has to be a Debian or Ubuntu with Python 3.11 or newer, venv and pip; both stages start from it, so that the
# interpreter that the virtual environment points to is the one it runs on.
ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS build
ARG EXTRA=serve
# pip options that say where torch comes from, such as "--extra-index-url URL" for the build of another CUDA version.
ARG TORCH_INDEX=""
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY service ./service
COPY client ./client
# With tracing: 12 MB that do nothing until OTEL_EXPORTER_OTLP_ENDPOINT is set, instead of another image for the day on
# which something has to be traced. Without pip inside: what runs in the cluster installs nothing. The byte code is
# compiled here, since the root file system is read-only there.
# hadolint ignore=SC2086
RUN python3 -m venv --without-pip /opt/forestage \
    && python3 -m pip --python /opt/forestage/bin/python3 install ${TORCH_INDEX} -c constraints.txt ".[${EXTRA},otel,zmq]"

FROM ${BASE}
# A name for the number: some libraries ask who they run as. Clusters need the number itself (runAsNonRoot).
RUN groupadd --gid 10001 forestage \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin forestage
COPY --from=build /opt/forestage /opt/forestage
ENV PATH=/opt/forestage/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
EXPOSE 8470
# Liveness only: L3 being away must not make the container unhealthy. It needs no token and no curl. Kubernetes ignores it
# and has its own probes; 127.0.0.1 answers whatever server.host says, unless that is another single address.
HEALTHCHECK --interval=10s --timeout=5s --start-period=600s --retries=6 \
    CMD ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8470/healthz', timeout=4)"]
ENTRYPOINT ["forestage"]
CMD ["serve", "--config", "/etc/forestage/forestage.toml"]
# Last, so that a new version changes no layer.
ARG VERSION=dev
ARG REVISION=unknown
LABEL org.opencontainers.image.title="forestage" \
      org.opencontainers.image.description="Brings KV-cache pages from L3 storage into a shared-memory pool before an LLM engine needs them" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
