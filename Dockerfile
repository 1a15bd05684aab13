# Trains, generates and serves on a CPU, as a user without privileges: docs/installation.md#container.
# The image has no C++ compiler, so `compile_level=O2` does not work in it.
FROM python:3.12-slim AS build
ARG EXTRAS=transformers,serve
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /source
RUN python -m venv /opt/kitforge
# torch comes first and alone: its layer stays when the source changes, and nothing later replaces the build for CPUs.
COPY constraints.txt ./
RUN /opt/kitforge/bin/pip install -c constraints.txt torch --index-url https://download.pytorch.org/whl/cpu
COPY pyproject.toml README.md LICENSE ./
COPY kitforge kitforge
RUN /opt/kitforge/bin/pip install -c constraints.txt ".[${EXTRAS}]"

FROM python:3.12-slim
COPY --from=build /opt/kitforge /opt/kitforge
# Both folders are writable by every user, for `docker run --user`. Caches may be kept with a volume at /cache.
RUN useradd --uid 1000 --create-home kitforge && mkdir -m 1777 /work /cache
ENV PATH=/opt/kitforge/bin:$PATH KITFORGE_CACHE=/cache/kitforge NUMBA_CACHE_DIR=/cache/numba HF_HOME=/cache/huggingface
USER kitforge
WORKDIR /work
EXPOSE 8000
ENTRYPOINT ["kitforge"]
CMD ["--help"]
