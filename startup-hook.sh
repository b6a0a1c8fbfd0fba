# Determined sources this in every container before training. In its default image it installs what that lacks, never
# another torch, and nothing where all is there.
_missing=$(python3 - <<'PY'
import importlib.util

NEEDED = {
    "attrdict": "attrdict3==2.0.2",
    "sklearn": "scikit-learn>=1.4",
    "joblib": "joblib>=1.3",
    "matplotlib": "matplotlib>=3.7",
    "filelock": "filelock>=3.12",
    "tqdm": "tqdm>=4.65",
    "tensorboard": "tensorboard>=2.15",
    "psutil": "psutil",
    "appdirs": "appdirs",
    "ruamel.yaml": "ruamel.yaml",
}


def is_missing(module):
    try:
        return importlib.util.find_spec(module) is None
    except ModuleNotFoundError:
        return True


print(" ".join(package for module, package in NEEDED.items() if is_missing(module)))
PY
)
if [ -n "$_missing" ]; then
    _installed=$(mktemp)
    python3 - > "$_installed" <<'PY'
from importlib.metadata import PackageNotFoundError, version

for package in ("torch", "torchvision", "numpy", "deepspeed", "determined"):
    try:
        print(f"{package}=={version(package)}")
    except PackageNotFoundError:
        pass
PY
    # shellcheck disable=SC2086  # one word a package
    python3 -m pip install --quiet --disable-pip-version-check --constraint "$_installed" $_missing
    rm -f "$_installed"
fi

# DeepSpeed's launcher starts a process for each GPU; where slots are CPU slots, it has to be told how many there are.
if ! nvidia-smi -L > /dev/null 2>&1; then
    export DS_ACCELERATOR=cpu
    LOCAL_SIZE=$(python3 -c 'import json, os; print(len(json.loads(os.environ.get("DET_SLOT_IDS", "[]"))) or 1)')
    export LOCAL_SIZE
fi
