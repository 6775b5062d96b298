# fuligo on CPUs, with the torch trainer, the embedded engine and Ray:
#   docker build --file docker/cpu.Dockerfile --tag fuligo:cpu .
FROM python:3.11.14-slim-bookworm@sha256:65a93d69fa75478d554f4ad27c85c1e69fa184956261b4301ebaf6dbb0a3543d AS build
WORKDIR /build
COPY requirements/ requirements/
RUN python -m venv /opt/fuligo \
 && /opt/fuligo/bin/pip install --no-cache-dir --no-deps --require-hashes --requirement requirements/hashed/base.txt \
      --requirement requirements/hashed/ray.txt \
 && /opt/fuligo/bin/pip install --no-cache-dir --constraint requirements/constraints.txt \
      --index-url https://download.pytorch.org/whl/cpu torch==2.13.0
COPY pyproject.toml README.md LICENSE ./
COPY fuligo/ fuligo/
RUN /opt/fuligo/bin/pip install --no-cache-dir --no-deps --no-build-isolation .

FROM python:3.11.14-slim-bookworm@sha256:65a93d69fa75478d554f4ad27c85c1e69fa184956261b4301ebaf6dbb0a3543d
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends openssh-client procps tini wget \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --create-home --uid 1000 fuligo
COPY --from=build /opt/fuligo /opt/fuligo
ENV PATH=/opt/fuligo/bin:$PATH PYTHONUNBUFFERED=1
USER 1000
WORKDIR /home/fuligo
# tini reaps the processes whose parent has ended, and passes signals on.
ENTRYPOINT ["tini", "--"]
CMD ["fuligo", "--help"]
