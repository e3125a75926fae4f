"""A rank that exchanges the messages of an in-place recovery, without training.

``member.py SECONDS [WAY [SLOT]]``: runs for SECONDS, or until a file ``over`` exists. The rank of
SLOT behaves specially: ``fails`` raises once, ``dies`` is killed once, ``orphan`` kills its agent,
``bereft`` raises soon after another rank is lost, ``unable`` says that it cannot recover, ``late``
is a slow newcomer, ``short`` a newcomer that fails. After ``dies`` and ``orphan``, all ranks end
when the group is complete again.
"""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

SLOT = int(os.environ["RANK"])
NEWCOMER = os.environ.get("PACELINE_NEWCOMER") == "1"
seconds, way, chosen = float(sys.argv[1]), *(*sys.argv[2:4], "", "-1")[:2]
special = way if int(chosen) == SLOT else ""
events = int(os.environ["PACELINE_EVENT_FD"])
groups: list[dict] = []
changed = threading.Condition()


def say(kind: str, **more: object) -> None:
    os.write(events, json.dumps({"kind": kind, **more}).encode() + b"\n")


def tell(event: str, **more: object) -> None:
    say("event", event=event, **more)


def listen() -> None:
    for line in os.fdopen(int(os.environ["PACELINE_CONTROL_FD"])):
        with changed:
            groups.append(json.loads(line))
            changed.notify_all()


def has_me(group: dict) -> bool:
    return any(member["slot"] == SLOT for member in group.get("members", ()))


def asked_to_stop(*_: object) -> None:
    print(f"saved at {step}", flush=True)
    tell("stopped", step=step, why="asked")
    os._exit(143)


step, seen = 0, 0
raise_at = 10 if special == "fails" and not NEWCOMER else -1
signal.signal(signal.SIGTERM, asked_to_stop)
threading.Thread(target=listen, daemon=True).start()
if NEWCOMER:
    time.sleep(3.0 if special == "late" else 0.2)
    if special == "short":
        raise ValueError("not again")
    tell("newcomer ready")
    with changed:
        changed.wait_for(lambda: any(g.get("planned") and has_me(g) for g in groups))
else:
    tell("recoverable", able=special != "unable", why="")
    print("began", flush=True)
end = time.monotonic() + seconds
while time.monotonic() < end and not Path("over").exists():
    while seen < len(groups):
        group, seen = groups[seen], seen + 1
        if group["control"] == "end":
            raise RuntimeError("Connection closed by peer: " + group["why"])
        if has_me(group):
            members = [member["slot"] for member in group["members"]]
            tell("regrouped", generation=group["generation"], step=step, seconds=0.01)
            print("group", group["generation"], members, group["store"]["port"], flush=True)
            if special == "bereft" and not group.get("planned"):
                raise_at = step + 10
            together = group.get("planned") and len(members) == int(os.environ["WORLD_SIZE"])
            if together and way in ("dies", "orphan"):
                end = min(end, time.monotonic() + 0.5)
            if NEWCOMER and not step:
                print("joined", flush=True)
                step = 1
    if step == raise_at:
        raise ValueError("boom")
    if special == "dies" and not NEWCOMER and step == 10:
        os.kill(os.getpid(), signal.SIGKILL)
    if special == "orphan" and not NEWCOMER and step == 10:
        fork_server = Path(f"/proc/{os.getppid()}/stat").read_text()
        os.kill(int(fork_server.rsplit(")", 1)[1].split()[1]), signal.SIGKILL)
    step += 1
    say("heartbeat", step=step, phase="train")
    time.sleep(0.05)
print("ended", flush=True)
