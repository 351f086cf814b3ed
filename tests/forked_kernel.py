"""Jupyter kernels that are forks of a process that has imported the heavy packages, as programs.py's scripts are."""

import os
import runpy
import sys
import time

import programs


class Kernel:
    """A kernel that has been started. jupyter_client takes it for a subprocess.Popen."""

    stdin = stdout = stderr = None

    def __init__(self, command: list[str], cwd: str, env: dict[str, str], **_: object):
        self.process = programs.CONTEXT.Process(target=_child, args=(command, cwd, env))
        self.process.start()
        self.pid = self.process.pid
        while os.getpgid(self.pid) != self.pid:  # else signals to its group would hit this process
            time.sleep(0.01)
        self.kill, self.terminate = self.process.kill, self.process.terminate

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self) -> int | None:
        self.process.join()
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


def _child(command: list[str], cwd: str, env: dict[str, str]) -> None:
    """What `python -m MODULE ...` does in a process that has imported matplotlib, but no backend."""
    import matplotlib

    os.setsid()
    os.chdir(cwd)
    os.environ.clear()
    os.environ |= env
    programs.leave_book()
    sys.path.insert(0, cwd)
    _, _, module, *sys.argv[1:] = command
    matplotlib.rcParams["backend"] = "module://matplotlib_inline.backend_inline"
    runpy.run_module(module, run_name="__main__", alter_sys=True)
