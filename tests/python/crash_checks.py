# SPDX-License-Identifier: Apache-2.0
"""What the crash runs (crash.py) compare after a start: what a server lists and resumes with
what was acknowledged."""

from __future__ import annotations

import contextlib
import pathlib
import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence

import attnd
import ctl
from campaign_clients import (
    LENGTHS,
    TENANTS,
    UPLOAD_S,
    Content,
    Known,
    answer_fault,
    unreachable,
)
from campaign_server import Server

CHECKED_EACH_START = 3
Clients = Mapping[str, attnd.Client]


@contextlib.contextmanager
def clients_of(target: str) -> Iterator[Clients]:
    """One of each tenant."""
    with contextlib.ExitStack() as stack:
        yield {
            tenant: stack.enter_context(attnd.Client(target, tenant=tenant, timeout_s=60))
            for tenant in TENANTS
        }


def listed(clients: Clients) -> dict[int, tuple[str, int]]:
    """Tenant and tokens of each sealed sequence."""
    return {
        entry.sealed_id: (tenant, entry.tokens)
        for tenant, client in clients.items()
        for entry in client.list_sealed()
    }


def comes_back(clients: Clients, sealed_id: int, content: Content) -> bool:
    """Whether it is whole, and its tenant's alone."""
    client = clients[content.tenant]
    try:
        back = client.open_sequence(content.model, resume=sealed_id)
    except attnd.FailedPreconditionError:
        return False  # of another case
    except (attnd.DataLossError, attnd.NotFoundError) as error:
        print(f"sealed {sealed_id}: {error}")
        return False
    whole = back.tokens_present == content.tokens
    if whole and not content.full:
        fault = answer_fault(client, back.sequence_id, content)
        if fault:
            print(f"sealed {sealed_id}: {fault}")
        whole = not fault
    client.close_sequence(back.sequence_id)
    return whole and not _opens_for_others(clients, sealed_id, content)


def _opens_for_others(clients: Clients, sealed_id: int, content: Content) -> bool:
    for tenant in set(clients) - {content.tenant}:
        with contextlib.suppress(attnd.NotFoundError):
            clients[tenant].open_sequence(content.model, resume=sealed_id)
            print(f"sealed {sealed_id} of {content} came back for {tenant}")
            return True
    return False


def lost_of(clients: Clients, known: Known) -> list[int]:
    """The acknowledged ones that are not listed as what they were."""
    there = listed(clients)
    lost = [
        sealed_id
        for sealed_id, content in known.sealed.items()
        if there.get(sealed_id) != (content.tenant, content.tokens)
        and sealed_id not in known.dropping
    ]
    for sealed_id in lost:
        print(f"sealed {sealed_id} of {known.sealed[sealed_id]} is lost: {there.get(sealed_id)}")
    return lost


def wrong_of(clients: Clients, known: Known, sealed_ids: list[int]) -> int:
    """How many of these do not come back as they were."""
    wrong = [i for i in sealed_ids if not comes_back(clients, i, known.sealed[i])]
    for sealed_id in wrong:
        print(f"sealed {sealed_id} of {known.sealed[sealed_id]} answers wrong")
    return len(wrong)


def check(target: str, known: Known, dice: random.Random) -> tuple[int, int]:
    """After a start: (lost, wrong). Adopts what was under way and has happened."""
    with clients_of(target) as clients:
        wrong = 0 if known.damaged is None else _check_damaged(clients, known)
        there = listed(clients)
        for sealed_id in known.dropping - set(there):
            known.sealed.pop(sealed_id, None)
        known.dropping.clear()
        lost = len(lost_of(clients, known))
        for sealed_id in set(there) - set(known.sealed):  # not acknowledged, and yet there
            fitting = [c for c in known.sealing if (c.tenant, c.tokens) == there[sealed_id]]
            whole = [c for c in fitting if comes_back(clients, sealed_id, c)]
            if whole:
                known.sealed[sealed_id] = whole[0]
            else:
                wrong += 1
                print(f"sealed {sealed_id} of {there[sealed_id]} is nobody's")
        known.sealing.clear()
        some = dice.sample(sorted(known.sealed), min(CHECKED_EACH_START, len(known.sealed)))
        return lost, wrong + wrong_of(clients, known, some)


def wrong_of_all(target: str, known: Known) -> int:
    with clients_of(target) as clients:
        return wrong_of(clients, known, sorted(known.sealed))


def check_rebuilt(
    folder: str, known: Known, dice: random.Random | None, flags: Sequence[str] = ()
) -> tuple[int, int]:
    """(lost, wrong) on a copy of a server's folder after attnctl has made its catalogue again: what
    was acknowledged must be listed by a server on it, and some of it, drawn by `dice`, or all must
    come back. Before that `attnctl verify` must find nothing."""
    with tempfile.TemporaryDirectory(prefix="attnd-copy-") as name:
        copy = pathlib.Path(name, "data")
        ctl.copy_data(pathlib.Path(folder, "data"), copy)
        some = sorted(set(known.sealed) - known.dropping)
        faults = ctl.faults_of(copy, known.damaged)
        rebuild_faults, put_away = ctl.rebuild(copy, len(some), known.damaged)
        faults += rebuild_faults
        with Server(name) as server:
            server.start(*flags)
            with clients_of(server.target) as clients:
                lost = lost_of(clients, known)
                if dice is not None:
                    some = dice.sample(some, min(CHECKED_EACH_START, len(some)))
                wrong = wrong_of(clients, known, [i for i in some if i not in lost])
            server.kill()
            if wrong:
                print(server.log_end())
    for line in faults + (put_away if lost else []):
        print(line)
    return len(lost), wrong + len(faults)


# ---- a file that is damaged on purpose ----

_DAMAGED = Content(TENANTS[0], 0, LENGTHS[1])


def seal_to_damage(target: str, known: Known) -> None:
    """Seals a sequence whose tail's file is the newest one then. Nobody else is at work."""
    with attnd.Client(target, tenant=_DAMAGED.tenant, timeout_s=20) as client:
        sequence = client.open_sequence(_DAMAGED.model).sequence_id
        layers = _DAMAGED.data.layers(slice(0, _DAMAGED.tokens))
        client.append_kv(sequence, attnd.layer_chunks(layers), timeout_s=UPLOAD_S)
        known.damaged = client.seal_sequence(sequence).sealed_id


def touch_damaged(server: Server, known: Known) -> bool:
    """Resumes what was damaged: whether it was DATA_LOSS, or the server ended meanwhile."""
    with attnd.Client(server.target, tenant=_DAMAGED.tenant, timeout_s=20) as client:
        try:
            client.open_sequence(_DAMAGED.model, resume=known.damaged)
        except attnd.DataLossError:
            return True
        except attnd.AttndError as error:
            if unreachable(error, server.is_gone):
                return True
            raise
    print(f"sealed {known.damaged} was damaged, and came back")
    return False


def _check_damaged(clients: Clients, known: Known) -> int:
    """1 if it came back."""
    client = clients[_DAMAGED.tenant]
    sealed_id, known.damaged = known.damaged, None
    try:
        client.open_sequence(_DAMAGED.model, resume=sealed_id)
    except attnd.DataLossError:
        client.drop_sealed(sealed_id)
        return 0
    print(f"sealed {sealed_id} was damaged, and came back")
    return 1
