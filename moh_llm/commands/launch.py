"""``python -m moh_llm.commands.launch ARGUMENTS``: `accelerate launch`, ended in order.

torchrun answers SIGTERM by a traceback, and kills after 30 s what still saves. Here SIGTERM and SIGUSR1 are passed on
to the processes of the run, which end their step, save and leave, and are waited for.
"""

import os
import signal
import subprocess
import sys
from types import FrameType

import psutil
from accelerate.commands.accelerate_cli import main as accelerate
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

PASSED_ON = (signal.SIGTERM, signal.SIGUSR1)
AGAIN = "give the same command again (without --overwrite), and the run goes on from its newest checkpoint"


def main(arguments: list[str]) -> int:
    """Launch with the arguments of `accelerate launch`.

    Returns:
        The exit status: 0 where all processes ended with 0, also when they were asked to; 128 and the signal's number
        where one was ended by it before it could save.
    """
    asked: list[int] = []

    def pass_on(number: int, _: FrameType | None) -> None:
        asked.append(number)
        children = psutil.Process().children()
        for child in children:
            child.send_signal(signal.SIGTERM)
        if not children:
            raise SignalException("before there were processes", sigval=signal.Signals(number))

    for number in PASSED_ON:
        signal.signal(number, pass_on)
    # torchrun's option of that name; the others end the run at once.
    os.environ["PET_SIGNALS_TO_HANDLE"] = "SIGINT,SIGHUP,SIGQUIT"
    sys.argv = ["accelerate", "launch", *arguments]
    try:
        accelerate()
    except SignalException as error:
        print(f"ended by {error.sigval.name}; {AGAIN}", file=sys.stderr)
        return 128 + error.sigval
    except (ChildFailedError, subprocess.CalledProcessError):
        if not asked:
            raise
        print(f"ended by {signal.Signals(asked[0]).name} before the run could save; {AGAIN}", file=sys.stderr)
        return 128 + asked[0]
    if asked:
        print(f"stopped by {signal.Signals(asked[0]).name}, as asked; {AGAIN}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
