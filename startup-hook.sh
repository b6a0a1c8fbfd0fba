# Determined sources this file in every container before training. It installs the packages that the image lacks, and
# never another torch. It prints only failures.
{ set +x; } 2> /dev/null # Determined's master prints every command
_installed=$(mktemp)
_missing=$(python3 - "$_installed" << 'PY'
import importlib.util
import sys
from importlib.metadata import PackageNotFoundError, version

NEEDED = {
    "attrdict": "attrdict3==2.0.2",
    "sklearn": "scikit-learn>=1.4",
    "joblib": "joblib>=1.3",
    "matplotlib": "matplotlib>=3.7",
    "filelock": "filelock>=3.12",
    "tqdm": "tqdm>=4.65",
    "simplejpeg": "simplejpeg>=1.7",
    "fsspec": "fsspec>=2023.5",
    "aiohttp": "aiohttp",
    "tenacity": "tenacity>=8.2",
    "tensorboard": "tensorboard>=2.15",
    "psutil": "psutil",
    "msgpack": "msgpack>=1.0",
    "packaging": "packaging>=22",
    "safetensors": "safetensors>=0.4.5",
    "appdirs": "appdirs",
    "ruamel.yaml": "ruamel.yaml",
}


def is_missing(module):
    try:
        return importlib.util.find_spec(module) is None
    except ModuleNotFoundError:
        return True


with open(sys.argv[1], "w") as installed:
    for package in ("torch", "torchvision", "numpy", "deepspeed", "determined"):
        try:
            print(f"{package}=={version(package)}", file=installed)
        except PackageNotFoundError:
            pass
print(" ".join(package for module, package in NEEDED.items() if is_missing(module)))
PY
)
if [ -n "$_missing" ]; then
    # shellcheck disable=SC2086  # one word for each package
    if ! _output=$(python3 -m pip install --disable-pip-version-check --constraint "$_installed" $_missing 2>&1); then
        echo "startup-hook.sh: cannot install $_missing; use an image that has them (Dockerfile)" >&2
        echo "$_output" >&2
        exit 1
    fi
fi
rm -f "$_installed"

# matplotlib reads every font once: do that in the background now, and not at the first figure
(python3 -c 'import matplotlib.font_manager' > /dev/null 2>&1 &)
