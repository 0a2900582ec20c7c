"""``headrace dlq`` and ``headrace scheduled``."""

import signal
import threading
import uuid

import pytest

from headrace.cli import dead_letters
from headrace.client.threads import BrokerClient
from headrace.testing import RunningServer, wait_until
from tests.cli.rig import Command, start_script


def bury(client: BrokerClient, name: str, *values: bytes, reason: str = "no such address") -> None:
    """Have a subscription over a topic of the same name give messages up."""
    for value in values:
        client.publish(name, value, {"source": "shop"}, key="k")
    consumer = client.subscription(name, name, max_deliveries=1)
    for _ in values:
        consumer.get(10).nack(reason=reason)
    consumer.close()
    wait_until(lambda: client.subscription_stats(name)["dead_lettered"] == len(values))


# --- list and show ----------------------------------------------------------------------------------
def test_dead_letters_are_counted(headrace: Command, client: BrokerClient) -> None:
    """Without a subscription: how many there are of each."""
    bury(client, "counted", b"one", b"two")
    assert ["counted.dlq", "2"] in headrace("dlq", "list").rows
    assert {"topic": "counted.dlq", "letters": 2} in headrace("dlq", "list", "--json").json


def test_dead_letters_are_listed(headrace: Command, client: BrokerClient) -> None:
    """A row each: where it came from, why it is here, and how it begins."""
    bury(client, "listed", b'{"order": 7}', b"[/b] \x1b[31m" + b"x" * 100, reason="[/bold] no")
    ran = headrace("dlq", "list", "listed")
    assert ran.code == 0
    assert ran.rows[0] == ["offset", "when", "(UTC)", "from", "attempts", "reason", "value"]
    assert 'listed/0@0         1  [/bold] no  {"order": 7}' in ran.lines[1]
    assert "[/b] \\x1b[31mxxx" in ran.lines[2]
    assert len(headrace("dlq", "list", "listed", "--limit", "1").lines) == 2


def test_dead_letters_in_json(headrace: Command, client: BrokerClient) -> None:
    """The letter and, in it, the message as it was."""
    bury(client, "shaped", b"one")
    [letter] = headrace("dlq", "list", "shaped", "--json").json
    assert set(letter) == {
        "offset", "subscription", "reason", "attempts", "timestamp", "message",
    }  # fmt: skip
    assert letter["message"]["topic"] == "shaped"
    assert letter["message"]["headers"] == {"source": "shop"}
    assert headrace("dlq", "show", "shaped", "0", "--json").json == letter


def test_a_dead_letter_is_shown_whole(headrace: Command, client: BrokerClient) -> None:
    """With its origin, its reason, its key and headers, and all of its value."""
    bury(client, "shown", b"first line\nsecond line")
    ran = headrace("dlq", "show", "shown", "0")
    assert ran.lines[0].startswith("from      shown/0@0, id ")
    assert ran.lines[1].endswith(" UTC after 1 delivery")
    assert ran.lines[2:] == [
        "reason    no such address",
        "key       k",
        "header    source=shop",
        "first line",
        "second line",
    ]


# --- redrive, edit, purge ---------------------------------------------------------------------------
def test_dead_letters_are_redriven(headrace: Command, client: BrokerClient) -> None:
    """Back to where they came from, for the subscription that failed."""
    bury(client, "redriven", b"one", b"two")
    ran = headrace("dlq", "redrive", "redriven")
    assert (ran.code, ran.lines) == (0, ["Redrove 2 letters."])
    assert headrace("dlq", "list", "redriven").lines == ["No dead letters of redriven."]
    ran = headrace("dlq", "redrive", "redriven", "--offset", "99")
    assert (ran.code, ran.lines) == (2, ["Redrove 0 letters."])
    assert "1 of 1 letter not found" in ran.err
    assert headrace("join-subscription", "redriven", "-n", "2").lines == [
        "redriven/0@2  one",
        "redriven/0@3  two",
    ]


def test_dead_letters_are_changed_on_their_way(headrace: Command, client: BrokerClient) -> None:
    """A preview first; then elsewhere, with a patch. What is no patch is refused."""
    bury(client, "patched", b'{"n": 1}', b"no json")
    patch = ("--transform", '{"x": 2}', "--to", "elsewhere")
    ran = headrace("dlq", "redrive", "patched", *patch, "--preview")
    assert ran.lines[0] == "2 letters would be redriven, 1 of them cannot be."
    assert '"x":2' in ran.lines[1].replace(" ", "")
    assert "not JSON" in ran.lines[2]
    ran = headrace("dlq", "redrive", "patched", "--to", "elsewhere", "--preview")
    assert ran.lines[0] == "2 letters would be redriven."
    ran = headrace("dlq", "redrive", "patched", *patch)
    assert (ran.code, ran.lines) == (2, ["Redrove 1 letter."])
    assert headrace("fetch", "elsewhere", "0").out.count('"x"') == 1
    assert "[invalid_transform]" in headrace("dlq", "redrive", "patched", "--transform", "{").err


def test_a_delayed_message_is_published_at_once(headrace: Command, client: BrokerClient) -> None:
    """By its id."""
    receipt = client.publish("hurried", b"x", delay=600)
    ran = headrace("scheduled", "publish", str(receipt.id))
    assert ran.lines == [f"Published message {receipt.id}."]
    assert headrace("scheduled", "publish", str(receipt.id)).code == 2


def test_some_dead_letters_are_redriven(headrace: Command, client: BrokerClient) -> None:
    """By offset, by reason, by topic, by number and at a rate."""
    bury(client, "chosen", b"0", b"1", b"2", b"3")
    assert headrace("dlq", "redrive", "chosen", "--offset", "3").lines == ["Redrove 1 letter."]
    assert headrace("dlq", "redrive", "chosen", "--reason", "timeout").lines == [
        "Redrove 0 letters."
    ]
    assert headrace("dlq", "redrive", "chosen", "--topic", "other").lines == ["Redrove 0 letters."]
    assert headrace("dlq", "redrive", "chosen", "--limit", "1").lines == ["Redrove 1 letter."]
    assert headrace("dlq", "redrive", "chosen", "--reason", "ADDRESS", "--rate", "10000").lines == [
        "Redrove 2 letters."
    ]


@pytest.mark.parametrize(
    ("name", "flags", "seen"),
    [
        ("alone", [], ["alone/0@0  one", "alone/0@2  end"]),
        ("all", ["--everybody"], ["all/0@0  one", "all/0@1  one", "all/0@2  end"]),
    ],
)
def test_redriving_to_everybody(
    headrace: Command, client: BrokerClient, name: str, flags: list[str], seen: list[str]
) -> None:
    """Only with --everybody do the other subscriptions of the topic see it again."""
    client.create_subscription("bystander", name)
    bury(client, name, b"one")
    headrace("dlq", "redrive", name, *flags)
    client.publish_text(name, "end")
    ran = headrace("join-subscription", "bystander", "--topic", name, "-n", len(seen))
    assert ran.lines == seen


def test_ctrl_c_stops_a_redrive(server: RunningServer, client: BrokerClient) -> None:
    """It says what was done and what is left; the letters that are left stay."""
    bury(client, "halted", b"0", b"1", b"2")
    process = start_script(
        *("dlq", "redrive", "halted", "--rate", "0.01"),
        HEADRACE_SERVER=f"{server.host}:{server.port}",
    )
    with process:
        wait_until(lambda: [each["redriven"] for each in client.redrives("halted")] == [1])
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (
        130,
        "Stopped: redrove 1 letter; 2 letters left.\n",
        "",
    )
    assert [each["state"] for each in client.redrives("halted")] == ["stopped"]
    assert len(client.dead_letters("halted")) == 2


def test_a_detached_redrive_is_listed_and_stopped(headrace: Command, client: BrokerClient) -> None:
    """It goes on without its command; a second command sees it, and stops it."""
    bury(client, "apart", b"0", b"1", b"2")
    assert headrace("dlq", "redrives", "apart").lines == ["No redrives of apart."]
    assert headrace("dlq", "stop-redrive", "apart").lines == ["No redrive of apart runs."]
    ran = headrace("dlq", "redrive", "apart", "--rate", "0.01", "--detach")
    assert (ran.code, ran.err) == (0, "")
    [found] = client.redrives("apart")
    assert ran.lines[0] == f"Redrive {found['id']} runs in the broker."
    wait_until(lambda: [each["redriven"] for each in client.redrives("apart")] == [1])
    [shown] = headrace("dlq", "redrives", "apart", "--json").json
    assert (shown["state"], shown["redriven"], shown["left"]) == ("running", 1, 2)
    ran = headrace("dlq", "stop-redrive", "apart")
    assert ran.lines == ["Stopped: redrove 1 letter; 2 letters left."]
    assert "stopped" in headrace("dlq", "redrives", "apart").out
    ran = headrace("dlq", "stop-redrive", "apart", str(uuid.UUID(int=7)))
    assert ran.code == 2
    assert "[redrive_not_found]" in ran.err


def test_a_redrive_that_another_stops(
    headrace: Command, client: BrokerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command that waits for it says so, with exit code 2."""
    monkeypatch.setattr(dead_letters, "LOOK_S", 0.05)
    bury(client, "foiled", b"0", b"1", b"2")

    def stop() -> None:
        wait_until(lambda: client.redrives("foiled"))
        client.stop_redrive("foiled", client.redrives("foiled")[0]["id"])

    stopping = threading.Thread(target=stop)
    stopping.start()
    ran = headrace("dlq", "redrive", "foiled", "--rate", "0.01")
    stopping.join()
    assert (ran.code, ran.out) == (2, "")
    assert "[redrive_stopped]" in ran.err


def test_a_dead_letter_is_corrected(headrace: Command, client: BrokerClient) -> None:
    """The corrected one takes a new place in the list."""
    bury(client, "edited", b"wrong")
    ran = headrace("dlq", "edit", "edited", "0", "--value", "right")
    assert (ran.code, ran.lines) == (0, ["Letter 0 is now letter 1."])
    assert headrace("dlq", "show", "edited", "1").lines[-1] == "right"


def test_purging_asks_first(headrace: Command, client: BrokerClient) -> None:
    """Yes gives them up for good; no leaves them."""
    bury(client, "purged", b"0", b"1", b"2")
    assert headrace("dlq", "purge", "purged", input="n\n", terminal=True).code == 1
    assert headrace("dlq", "purge", "purged", "--offset", "1", "--yes").lines == [
        "Deleted 1 letter."
    ]
    ran = headrace("dlq", "purge", "purged", input="y\n", terminal=True)
    assert "Delete all dead letters of purged?" in ran.err
    assert "Deleted 2 letters." in ran.out


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["list", "nobody"], "no_dead_letters"),
        (["show", "found", "99"], "message_not_found"),
        (["edit", "found", "99", "--value", "x"], "message_not_found"),
        (["redrive", "nobody"], "no_dead_letters"),
        (["redrive", "found", "--rate", "0"], "invalid_argument"),
        (["purge", "nobody", "--yes"], "no_dead_letters"),
    ],
)
def test_what_is_not_there(
    headrace: Command, client: BrokerClient, arguments: list[str], code: str
) -> None:
    """One sentence and exit code 2."""
    if not client.subscriptions("found"):
        bury(client, "found", b"one")
    ran = headrace("dlq", *arguments)
    assert ran.code == 2
    assert f"[{code}]" in ran.err
    assert ran.out == ""


# --- scheduled --------------------------------------------------------------------------------------
def test_delayed_messages_are_listed(headrace: Command, client: BrokerClient) -> None:
    """Soonest first, of all topics or of one."""
    later = client.publish("calendar", b"later", delay=7200)
    sooner = client.publish("calendar", b"sooner", delay=3600)
    ran = headrace("scheduled", "list", "calendar")
    assert ran.lines[0].split() == ["when", "(UTC)", "topic", "id"]
    assert [row[-1] for row in ran.rows[1:]] == [str(sooner.id), str(later.id)]
    first, _ = headrace("scheduled", "list", "calendar", "--json").json
    assert first["id"] == str(sooner.id)
    assert set(first) == {"id", "topic", "deliver_at"}
    assert headrace("scheduled", "list", "empty").lines == ["No delayed messages."]


def test_a_delayed_message_is_cancelled(headrace: Command, client: BrokerClient) -> None:
    """Once; a second time there is nothing to cancel."""
    receipt = client.publish("cancelled", b"never", delay=3600)
    ran = headrace("scheduled", "cancel", receipt.id, "--yes")
    assert (ran.code, ran.lines) == (0, [f"Cancelled message {receipt.id}."])
    ran = headrace("scheduled", "cancel", receipt.id, "--yes")
    assert ran.code == 2
    assert "[not_scheduled]" in ran.err


@pytest.mark.parametrize(
    ("message_id", "code"), [("abc", "invalid_id"), (str(uuid.UUID(int=7)), "not_scheduled")]
)
def test_what_was_never_scheduled(headrace: Command, message_id: str, code: str) -> None:
    """One sentence and exit code 2."""
    ran = headrace("scheduled", "cancel", message_id, "--yes")
    assert ran.code == 2
    assert f"[{code}]" in ran.err
