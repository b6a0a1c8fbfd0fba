"""A stand-in for a Determined master, over real HTTP: takes what a trial reports and can ask it to pause."""

import http.server
import json
import threading
import time


class Master:
    """Answers what the trial side of Determined asks; ``posted`` holds every (path, body) that came in."""

    def __init__(self):
        self.posted: list[tuple[str, dict]] = []
        self.preempt = False
        self.preempt_after_steps: int | None = None
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self.server.server_port}"

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
        return {"trial": {}} if "/trials/" in path else {}

    def _handler(self):
        master = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                path = self.path.partition("?")[0]
                self.reply(404 if "best_searcher_validation_metric" in path else 200, master._answer(path))

            def do_POST(self):
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                path = self.path.partition("?")[0]
                master.posted.append((path, json.loads(body) if body else {}))
                steps = max(master.metrics("training"), default=0)
                if master.preempt_after_steps is not None and steps >= master.preempt_after_steps:
                    master.preempt = True
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
