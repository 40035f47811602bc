"""The main thread's waits are ended by a signal, also by one that comes just before they begin."""

from __future__ import annotations

import subprocess
import sys

import pytest

_CODE = """
import os, signal, threading
from torchrec_ext import waits

waits._SLEEP_SECONDS = {seconds}
heard = 0
event, condition, semaphore = threading.Event(), threading.Condition(), threading.Semaphore(0)

def notify():
    with condition:
        condition.notify_all()

def wait_until(number):
    with condition:
        waits.wait_until(condition, lambda: heard > number)

def wait_until_set(number):
    waits.wait_until_set(event)
    event.clear()

def acquire(number):
    waits.acquire(semaphore)

ways = {{
    "wait_until": (wait_until, notify),
    "wait_until_set": (wait_until_set, event.set),
    "acquire": (acquire, semaphore.release),
}}
wait, wake = ways[{way!r}]

def hear(*_):
    global heard
    heard += 1
    threading.Thread(target=wake).start()  # the main one may hold the lock

signal.signal(signal.SIGINT, hear)
ready = threading.Semaphore(0)

def send():
    # Comes to run when the main thread lets go of the interpreter: just before it sleeps.
    while ready.acquire():
        os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=send, daemon=True).start()
for number in range({times}):
    ready.release()
    wait(number)
print("heard all")
"""


@pytest.mark.parametrize("way", ["wait_until", "wait_until_set", "acquire"])
def test_signal_is_heard_whenever_it_comes(way: str) -> None:
    code = _CODE.format(way=way, seconds=0.01, times=4_000)  # one in some hundred comes in between
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout == "heard all\n", done.stderr
