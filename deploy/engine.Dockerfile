# An engine's image with Forestage's client in it, which the overlays expect. From the root of a checkout:
#
#   docker build -f deploy/engine.Dockerfile -t sglang-forestage:v0.5.23 --build-arg BASE=lmsysorg/sglang:v0.5.23 .
#   docker build -f deploy/engine.Dockerfile -t vllm-forestage:v0.33.0 --build-arg BASE=vllm/vllm-openai:v0.33.0 .
ARG BASE=lmsysorg/sglang:v0.5.23
FROM ${BASE}
WORKDIR /tmp/forestage
COPY pyproject.toml README.md LICENSE ./
COPY service ./service
COPY client ./client
# The light client: two small packages beside it, no torch, nothing that the engine has is replaced. The images keep their
# packages in the system's Python, which newer distributions let pip touch only when told so.
RUN PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --no-cache-dir .
WORKDIR /
