# logitd in a container, run by an ordinary user. The native kernels are built for
# every supported instruction set; `logitd serve` chooses the best one that the processor can run.
#
#   docker build --build-arg TORCH_INDEX=cpu -t logitd .
#   docker run --init --rm -p 127.0.0.1:8000:8000 -e LOGITD_ALLOWED_HOSTS=localhost logitd
#
# Without TORCH_INDEX torch comes from PyPI: the CUDA build, several GB.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS kernels
# The compiler stays in this stage; the patch version that Debian installs does not matter.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY logitd logitd
COPY model/__init__.py model/dtypes.py model/processor.py model/
COPY model/inference/__init__.py model/inference/options.py model/inference/
COPY model/inference/kernels/__init__.py model/inference/kernels/
COPY model/inference/kernels/cpu model/inference/kernels/cpu
RUN python3 -m logitd.model.inference.kernels.cpu.prebuild

FROM ${PYTHON_IMAGE} AS build
WORKDIR /src
RUN python3 -m venv /opt/logitd
ENV PATH=/opt/logitd/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
COPY requirements.lock ./
RUN pip install --require-hashes -r requirements.lock
ARG TORCH_INDEX=
# The name of an index that uv knows, such as cpu, or the address of one. torch is pinned, but the rule
# does not recognize this behind an optional flag.
# hadolint ignore=DL3013
RUN case "${TORCH_INDEX}" in \
      ''|*/*) pip install ${TORCH_INDEX:+--index-url ${TORCH_INDEX}} torch==2.13.0 ;; \
      *) pip install 'uv>=0.13,<1' \
         && uv pip install --python /opt/logitd/bin/python --torch-backend "${TORCH_INDEX}" torch==2.13.0 \
         && pip uninstall --yes uv ;; \
    esac
COPY pyproject.toml README.md LICENSE ./
COPY model model
COPY service service
COPY logitd logitd
COPY --from=kernels /src/model/inference/kernels/cpu/prebuilt model/inference/kernels/cpu/prebuilt
RUN pip install --no-deps . && pip uninstall --yes pip

FROM ${PYTHON_IMAGE}
# On a GPU, Triton compiles kernels at the first start, and the C code that launches them.
ARG TORCH_INDEX=
# hadolint ignore=DL3008
RUN if [ "${TORCH_INDEX}" != cpu ]; then apt-get update \
      && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*; fi
COPY --from=build /opt/logitd /opt/logitd
COPY checkpoints /checkpoints
ENV PATH=/opt/logitd/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    LOGITD_HOST=0.0.0.0 \
    LOGITD_PORT=8000 \
    LOGITD_CHECKPOINT=/checkpoints/python-small
USER 10001:10001
WORKDIR /tmp
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=3s --start-period=30s --retries=3 \
    CMD ["logitd", "health"]
ENTRYPOINT ["logitd"]
CMD ["serve"]
