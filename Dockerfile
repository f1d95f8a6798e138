# docker build --tag postnorm .                                  for CPUs, about 2.5 GB
# docker build --tag postnorm:cuda --build-arg VARIANT=cuda .    for NVIDIA GPUs: torch brings CUDA, the host its driver
# docker run --rm --volume "$PWD:/work" --user "$(id -u):$(id -g)" postnorm demo --quick
# `make image` and `make image-cuda` also record the git revision, which every run writes down.
ARG VARIANT=cpu
FROM python:3.11-slim AS cpu
# Here torch has builds without CUDA.
ENV PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
FROM python:3.11-slim AS cuda

FROM ${VARIANT}
# g++ is for Triton and torch.compile, which compile what they launch.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
ENV DS_BUILD_OPS=0 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /opt/postnorm
# Dependencies before code: an edit of the code does not fetch them again.
COPY pyproject.toml constraints.txt ./
RUN python -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; e = p['optional-dependencies']; print(*(x for x in p['dependencies'] + e['train'] + e['hf'] if not x.startswith('postnorm')), sep='\n')" > requirements.txt \
    && pip install --constraint constraints.txt --requirement requirements.txt
COPY . .
ARG REVISION="unknown (an image built without it)"
RUN pip install --no-deps --editable . \
    && echo "$REVISION" > REVISION \
    && useradd --create-home postnorm \
    && install --directory --owner=postnorm --mode=1777 /work
# For any `--user`: a folder that WORKDIR makes belongs to root.
USER postnorm
WORKDIR /work
ENTRYPOINT ["postnorm"]
CMD ["--help"]
