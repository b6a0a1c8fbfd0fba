# The image with the packages of requirements.txt, if the cluster's default image is too old:
# docker build -t NAME . && docker push NAME
# The experiment file names it: environment: {image: NAME}
FROM determinedai/pytorch-ngc-dev:0736b6d
COPY requirements.txt /tmp/
RUN python3 -m pip install --no-cache-dir -r /tmp/requirements.txt && rm /tmp/requirements.txt
