# An image of this project for Kubernetes: docker build -t NAME -f examples/kubernetes.Dockerfile .
# torch's wheels bring CUDA's libraries. No test builds the image.
FROM python:3.12-slim
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /workspace
COPY requirements.txt ./
RUN pip install --no-cache-dir -r requirements.txt s3fs gcsfs
COPY *.py *.json *.yaml ./
COPY classify classify
COPY deepspeed_trial deepspeed_trial
COPY workbench workbench
COPY experiments experiments
