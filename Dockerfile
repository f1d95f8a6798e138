# The same installation as on a laptop; code and data are mounted or copied, runs go to /work/runs.
FROM python:3.11-slim
RUN apt-get update \
    && apt-get install --yes --no-install-recommends make gcc g++ git \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /work
COPY . .
RUN make setup
ENV PATH=/work/.venv/bin:$PATH
CMD ["make", "help"]
