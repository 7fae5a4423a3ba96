# A worker image: matcha with torch's CPU build. For GPUs, start from a CUDA image with torch in it
# and keep the last three instructions.
FROM python:3.11-slim

RUN useradd --create-home worker
WORKDIR /home/worker
COPY pyproject.toml hatch_build.py README.md LICENSE constraints.txt ./
COPY src ./src
RUN pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu \
    --constraint constraints.txt ".[torch]"

USER worker
ENV OMP_NUM_THREADS=1
ENTRYPOINT ["matcha"]
CMD ["--help"]
