# fuligo on NVIDIA GPUs, with the torch and Megatron trainers, Ray, and SGLang in an environment of its own:
#   docker build --file docker/gpu.Dockerfile --tag fuligo:gpu .
# Give runs --engine-python /opt/sglang/bin/python. SGLang compiles kernels at run time, so the image keeps the CUDA compiler.
FROM nvidia/cuda:13.0.2-cudnn-devel-ubuntu24.04@sha256:e071e85c52ad91fc9ea24158ff5330876b2d1a5c4ac83ccc6066976835873c01 AS build
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends build-essential git python3-dev python3-venv \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /build
COPY requirements/ requirements/
RUN python3 -m venv /opt/fuligo \
 && /opt/fuligo/bin/pip install --no-cache-dir --no-deps --require-hashes --requirement requirements/hashed/base.txt \
      --requirement requirements/hashed/ray.txt --requirement requirements/hashed/gpu.txt \
 && /opt/fuligo/bin/pip install --no-cache-dir --no-deps --require-hashes --no-build-isolation \
      --requirement requirements/hashed/megatron-gpu.txt
RUN python3 -m venv /opt/sglang \
 && /opt/sglang/bin/pip install --no-cache-dir --no-deps --require-hashes --requirement requirements/hashed/sglang-gpu.txt
COPY pyproject.toml README.md LICENSE ./
COPY fuligo/ fuligo/
RUN /opt/fuligo/bin/pip install --no-cache-dir --no-deps --no-build-isolation .

FROM nvidia/cuda:13.0.2-cudnn-devel-ubuntu24.04@sha256:e071e85c52ad91fc9ea24158ff5330876b2d1a5c4ac83ccc6066976835873c01
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends build-essential libibverbs1 openssh-client procps python3-dev tini wget \
 && rm -rf /var/lib/apt/lists/* \
 && (userdel --remove ubuntu || true) \
 && useradd --create-home --uid 1000 fuligo
COPY --from=build /opt/fuligo /opt/fuligo
COPY --from=build /opt/sglang /opt/sglang
ENV PATH=/opt/fuligo/bin:$PATH PYTHONUNBUFFERED=1
USER 1000
WORKDIR /home/fuligo
ENTRYPOINT ["tini", "--"]
CMD ["fuligo", "--help"]
