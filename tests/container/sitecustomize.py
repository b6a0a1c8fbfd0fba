"""Makes every Python process of a test find Determined's container files in a folder of the test's."""

import os

if folder := os.environ.get("CONTAINER_FILES"):
    from determined import _info, constants, ipc
    from determined.common import constants as common_constants

    for kind in (_info.ClusterInfo, _info.TrialInfo, _info.RendezvousInfo, _info.ResourcesInfo):
        name = kind.__name__.removesuffix("Info").lower()
        kind._from_file.__func__.__defaults__ = (f"{folder}/{name}.json",)
    common_constants.SHARED_FS_CONTAINER_PATH = f"{folder}/shared"
    constants.MANAGED_TRAINING_MODEL_COPY = f"{folder}/model"

    # Determined ends DeepSpeed's launcher (exit code 241) 5 s after its workers. It takes 3 s to end by itself on an
    # idle machine, more beside other tests.
    run_subprocess = ipc.PIDServer.run_subprocess
    ipc.PIDServer.run_subprocess = lambda self, **options: run_subprocess(
        self, **{**options, "on_exit": None}
    )
