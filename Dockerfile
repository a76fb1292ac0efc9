# syntax=docker/dockerfile:1
# Images from the lock files: `docker build --target cpu .`, `docker build --target gpu .`, and of the load test `docker build --target loadtest .`.
# To pin the base image to its content, pass --build-arg PYTHON_IMAGE=python:3.11.14-slim-bookworm@sha256:...

ARG PYTHON_IMAGE=python:3.11.14-slim-bookworm

# What both images run on. A C++ compiler, because torch and Triton compile kernels at the first start of a model.
FROM ${PYTHON_IMAGE} AS base
# Debian removes old versions from its mirrors, so a pinned version would soon fail the build.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ libnuma1 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --user-group --no-create-home --home-dir /var/cache/minedraft --shell /usr/sbin/nologin minedraft \
    && install -d -o minedraft -g minedraft -m 0750 /var/cache/minedraft
ENV PATH=/opt/minedraft/bin:$PATH \
    HOME=/var/cache/minedraft \
    XDG_CACHE_HOME=/var/cache/minedraft \
    XDG_CONFIG_HOME=/var/cache/minedraft/config \
    TORCHINDUCTOR_CACHE_DIR=/var/cache/minedraft/inductor \
    TRITON_CACHE_DIR=/var/cache/minedraft/triton \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    MINEDRAFT_HOST=0.0.0.0

# MineDraft itself, as a wheel.
FROM ${PYTHON_IMAGE} AS wheel
WORKDIR /source
COPY requirements-cpu.lock ./
RUN pip install --no-cache-dir --no-deps "$(grep '^setuptools==' requirements-cpu.lock)"
COPY . .
RUN pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels .

FROM base AS packages-cpu
COPY requirements-cpu.lock /locks/
# torch on its own: only its build for CPUs lies on that page.
RUN python -m venv /opt/minedraft \
    && pip install --no-cache-dir --no-deps --find-links https://download.pytorch.org/whl/cpu/torch/ \
        "$(grep '^torch==' /locks/requirements-cpu.lock)" \
    && pip install --no-cache-dir --no-deps -r /locks/requirements-cpu.lock

FROM base AS packages-gpu
COPY requirements-gpu.lock /locks/
RUN python -m venv /opt/minedraft \
    && pip install --no-cache-dir --no-deps -r /locks/requirements-gpu.lock

FROM ${PYTHON_IMAGE} AS packages-loadtest
COPY requirements-cpu.lock requirements-dev.lock /locks/
# The locks say at which version, the wheel says what.
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    python -m venv /opt/minedraft \
    && /opt/minedraft/bin/pip install --no-cache-dir -c /locks/requirements-cpu.lock -c /locks/requirements-dev.lock "$(ls /wheels/*.whl)[loadtest]"

FROM ${PYTHON_IMAGE} AS loadtest
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /results --shell /usr/sbin/nologin minedraft \
    && install -d -o minedraft -g minedraft -m 0750 /results
ENV PATH=/opt/minedraft/bin:$PATH \
    MPLCONFIGDIR=/tmp \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
COPY --from=packages-loadtest /opt/minedraft /opt/minedraft
LABEL org.opencontainers.image.title="MineDraft (load test)" \
      org.opencontainers.image.description="Load tests of an OpenAI-compatible server, with Locust" \
      org.opencontainers.image.licenses="Apache-2.0"
USER 10001:10001
WORKDIR /results
VOLUME /results
EXPOSE 8089
ENTRYPOINT ["minedraft", "loadtest"]

FROM base AS cpu
COPY --from=packages-cpu /opt/minedraft /opt/minedraft
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels pip install --no-cache-dir --no-deps /wheels/*.whl
COPY deploy/healthcheck.py /opt/healthcheck.py
LABEL org.opencontainers.image.title="MineDraft (CPU)" \
      org.opencontainers.image.description="OpenAI-compatible server whose drafting is hidden behind verification" \
      org.opencontainers.image.licenses="Apache-2.0"
USER 10001:10001
WORKDIR /var/cache/minedraft
VOLUME /var/cache/minedraft
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=3 CMD ["python", "/opt/healthcheck.py"]
ENTRYPOINT ["minedraft", "serve"]

FROM base AS gpu
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=packages-gpu /opt/minedraft /opt/minedraft
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels pip install --no-cache-dir --no-deps /wheels/*.whl
COPY deploy/healthcheck.py /opt/healthcheck.py
LABEL org.opencontainers.image.title="MineDraft (NVIDIA GPUs)" \
      org.opencontainers.image.description="OpenAI-compatible server whose drafting is hidden behind verification" \
      org.opencontainers.image.licenses="Apache-2.0"
USER 10001:10001
WORKDIR /var/cache/minedraft
VOLUME /var/cache/minedraft
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=30m --retries=3 CMD ["python", "/opt/healthcheck.py"]
ENTRYPOINT ["minedraft", "serve"]
