"""A stand-in for a Determined master, over real HTTP: takes what a trial reports, pauses it and stops it."""

import http.server
import json
import threading
import time
from collections.abc import Callable


class Master:
    """Answers what the trial side of Determined asks; ``posted`` holds every (path, body) that came in.

    Args:
        host: the address at which the trial finds it.

    Attributes:
        preempt_after_steps: at a report of so many steps it asks the trial to pause.
        stop_after_steps: at a validation after so many steps its search stops the trial.
        on_post: called after each report.
    """

    def __init__(self, host: str = "127.0.0.1"):
        self.posted: list[tuple[str, dict]] = []
        self.preempt = False
        self.preempt_after_steps: int | None = None
        self.stop_after_steps: int | None = None
        self.on_post: Callable[[], object] = lambda: None
        self.state = "STATE_RUNNING"
        self.validated = 0
        self.server = http.server.ThreadingHTTPServer((host, 0), self._handler())
        self.url = f"http://{host}:{self.server.server_port}"

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exception):
        self.server.shutdown()

    def bodies(self, ending: str) -> list[dict]:
        return [body for path, body in self.posted if path.endswith(ending)]

    def metrics(self, group: str) -> dict[int, dict]:
        """The average metrics that were reported, by their steps."""
        reports = [body["metrics"] for body in self.bodies("/metrics") if body.get("group") == group]
        return {each["stepsCompleted"]: each["metrics"]["avgMetrics"] for each in reports}

    def _answer(self, path: str) -> dict:
        if path.endswith("/signals/preemption"):
            until = time.monotonic() + 2  # long polling
            while not self.preempt and time.monotonic() < until:
                time.sleep(0.02)
            return {"preempt": self.preempt}
        if path.endswith("/runs/1/prepare") or "prepare" in path:
            return {"storageId": 1}
        return {"trial": self._trial()} if path.endswith("/trials/1") else {}

    def _trial(self) -> dict:
        """What Determined 0.38.1 answers to GET /api/v1/trials/1, but for figures that no one reads."""
        steps = max(self.metrics("training"), default=0)
        validation = {"totalBatches": self.validated, "metrics": {"avgMetrics": {}}}
        return {
            "id": 1,
            "experimentId": 1,
            "startTime": "2025-03-20T15:09:13.000Z",
            "endTime": None,
            "state": self.state,
            "restarts": 0,
            "hparams": {},
            "totalBatchesProcessed": steps,
            "latestValidation": validation if self.validated else None,
            "bestCheckpoint": None,
        }

    def _take(self, path: str, body: dict) -> None:
        """Notes a report. As in Determined a validation goes to the search first, and is then recorded."""
        self.posted.append((path, body))
        steps = max(self.metrics("training"), default=0)
        if self.preempt_after_steps is not None and steps >= self.preempt_after_steps:
            self.preempt = True
        if path.endswith("/metrics") and body["group"] == "validation":
            time.sleep(0.5)
            validated = body["metrics"]["stepsCompleted"]
            if self.stop_after_steps is not None and validated >= self.stop_after_steps:
                self.state = "STATE_STOPPING_COMPLETED"  # and nothing to the container
            self.validated = validated
        self.on_post()

    def _handler(self):
        master = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                path = self.path.partition("?")[0]
                self.reply(404 if "best_searcher_validation_metric" in path else 200, master._answer(path))

            def do_POST(self):
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                path = self.path.partition("?")[0]
                master._take(path, json.loads(body) if body else {})
                self.reply(200, master._answer(path))

            do_PATCH = do_PUT = do_POST

            def reply(self, code, answer):
                data = json.dumps(answer).encode()
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *arguments):
                pass

        return Handler
