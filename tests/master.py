"""A stand-in for a Determined master, over real HTTP: it takes a trial's reports, pauses and stops the trial."""

import http.server
import json
import threading
import time
from collections.abc import Callable


class Master:
    """Answers the trial side of Determined; ``posted`` holds every (path, body) that came in.

    Args:
        host: the address at which the trial finds it.

    Attributes:
        preempt_after_steps: at a report of this many steps it asks the trial to pause.
        stop_after_steps: at a validation after this many steps its search stops the trial.
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
        self.server.server_close()

    def bodies(self, ending: str) -> list[dict]:
        return [body for path, body in self.posted if path.endswith(ending)]

    def metrics(self, group: str) -> dict[int, dict]:
        """The average metrics of the reports, by their steps."""
        reports = [body["metrics"] for body in self.bodies("/metrics") if body.get("group") == group]
        return {each["stepsCompleted"]: each["metrics"]["avgMetrics"] for each in reports}

    def _answer(self, path: str) -> dict:
        if path.endswith("/signals/preemption"):
            until = time.monotonic() + 2  # long polling
            while not self.preempt and time.monotonic() < until:
                time.sleep(0.02)
            return {"preempt": self.preempt}
        if path.endswith("/trials/1"):  # the fields of Determined 0.38.1 that a trial may read
            validation = {"totalBatches": self.validated, "metrics": {"avgMetrics": {}}}
            trial = {"id": 1, "experimentId": 1, "state": self.state, "restarts": 0, "hparams": {}}
            return {"trial": {**trial, "latestValidation": validation if self.validated else None}}
        return {"storageId": 1} if "prepare" in path else {}

    def _take(self, path: str, body: dict) -> None:
        """Note a report. As in Determined a validation reaches the search first, then the record."""
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
