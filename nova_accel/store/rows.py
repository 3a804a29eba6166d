# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The rows of cards, inside a transaction: which one is of which card.

A card is known by its serial number; where that is not known, or where several
cards of the host have the same one, by its address and product. A row whose
card is at its address is ``placed``; the others are of cards that are away.
"""

from collections.abc import Mapping
import dataclasses
import json
import sqlite3

from nova_accel import model

#: values of the column unsettled: whose data it is has to be asked, or it is
#: known that its server is gone. After the first one the address at which its
#: server had it, where the card has another one since
_LOST, _RETURNED = 'lost', 'returned'


def placed(db: sqlite3.Connection, address: str) -> int:
    """Return the card at an address, a new one where none is known there."""
    found = db.execute('SELECT number FROM cards WHERE placed AND address = ?',
                       (address,)).fetchone()
    if found:
        return found[0]
    number = card(db, address, '')
    db.execute('UPDATE cards SET placed = 1 WHERE number = ?', (number,))
    return number


def card(db: sqlite3.Connection, address: str, serial: str,
         ids: str | None = None) -> int:
    """Return a card, a new one that is away where it is not known.

    :param address: where it is or was last.
    :param serial: '' where it is not known, or not the only one.
    :param ids: Device.ids, '' of a card of which only the address is known;
        None where the card at the address is meant, whichever that is.
    """
    if serial:
        found = db.execute('SELECT number FROM cards WHERE serial = ?',
                           (serial,)).fetchone()
    elif ids is None:
        found = db.execute(
            "SELECT number FROM cards WHERE address = ? AND (placed OR "
            "serial = '' AND ids = '') ORDER BY placed DESC", (address,)
            ).fetchone()
    else:
        found = db.execute(
            "SELECT number FROM cards WHERE address = ? AND serial = '' "
            'AND ids = ? ORDER BY placed DESC', (address, ids)).fetchone()
    if found:
        return found[0]
    return add(db, address, serial, ids or '')


def arrives(db: sqlite3.Connection, address: str, serial: str,
            ids: str) -> int:
    """Return the card that is at an address from now on: card(), or the one of
    which nothing but the address is known."""
    if not db.execute(
            "SELECT 1 FROM cards WHERE serial = ?1 AND (?1 <> '' OR address = "
            '?2 AND ids = ?3)', (serial, address, ids)).fetchone():
        number = card(db, address, '', '')
        db.execute('UPDATE cards SET serial = ? WHERE number = ?',
                   (serial, number))
        return number
    return card(db, address, serial, ids)


def own_serials(devices: Mapping[str, model.Device]) -> dict[str, str]:
    """Return the serial numbers that tell devices from all others, by address.

    Of several with one serial number none has it, but for those that are gone.
    """
    found: dict[str, list[model.Device]] = {}
    for address, device in devices.items():
        if device.serial:
            found.setdefault(device.serial, []).append(
                dataclasses.replace(device, address=address))
    result = {}
    for serial, there in found.items():
        there = [d for d in there if d.health is not model.Health.GONE
                 ] or there
        if len(there) == 1:
            result[there[0].address] = serial
    return result


def add(db: sqlite3.Connection, address: str, serial: str, ids: str) -> int:
    return db.execute(
        'INSERT INTO cards (address, serial, ids, placed) VALUES (?, ?, ?, 0) '
        'RETURNING number', (address, serial, ids)).fetchone()[0]


def put_away(db: sqlite3.Connection, address: str) -> None:
    """Write that the card at an address is not there any more."""
    db.execute('UPDATE cards SET placed = 0, device = NULL '
               'WHERE placed AND address = ?', (address,))


def put(db: sqlite3.Connection, number: int, address: str) -> None:
    """Write that a card is at an address."""
    db.execute(
        "UPDATE cards SET placed = 1, address = ?1, unsettled = iif("
        "unsettled = ?2 AND address <> ?1, ?2 || ' ' || address, unsettled) "
        'WHERE number = ?3', (address, _LOST, number))


def copy(db: sqlite3.Connection, number: int) -> int:
    """Return a new card, of which is known what is known of another one."""
    facts = 'address, ids, record, disabled, since, unsettled, but_for, unclean'
    return db.execute(
        f"INSERT INTO cards (serial, placed, {facts}) SELECT '', 0, {facts} "
        f'FROM cards WHERE number = ? RETURNING number', (number,)
        ).fetchone()[0]


def take(db: sqlite3.Connection, number: int, serial: str) -> None:
    """Give a card the serial number that it turns out to have, and no other
    one: a row that had it, of a card that is away, was about this one."""
    db.execute("UPDATE cards SET serial = '' WHERE serial = ? AND placed "
               'AND number <> ?', (serial, number))
    other = db.execute(
        "SELECT number, disabled, since, iif(unsettled = ?3, ?3 || ' ' || "
        'address, unsettled), but_for, unclean FROM cards WHERE serial = ?1 '
        'AND number <> ?2', (serial, number, _LOST)).fetchone()
    if other:
        db.execute('DELETE FROM cards WHERE number = ?', (other['number'],))
        db.execute(
            "UPDATE cards SET since = iif(disabled IS NULL, ?2, since), "
            "disabled = coalesce(disabled, ?1), "
            "but_for = iif(unsettled = '', ?4, but_for), "
            "unsettled = iif(unsettled = '', ?3, unsettled), "
            "unclean = iif(unclean = '', ?5, unclean) WHERE number = ?6",
            (*tuple(other)[1:], number))
    db.execute('UPDATE cards SET serial = ? WHERE number = ?',
               (serial, number))


def drop_what_says_nothing(db: sqlite3.Connection) -> None:
    """Remove cards that are away, could not be told if they came back, and of
    which nothing is known that matters."""
    db.execute(
        "DELETE FROM cards WHERE NOT placed AND serial = '' AND disabled IS "
        "NULL AND unsettled = '' AND unclean = '' AND NOT EXISTS (SELECT 1 "
        "FROM regions WHERE card = number AND origin IS NOT ?)",
        (model.OPERATOR,))
    db.execute('DELETE FROM regions WHERE card NOT IN '
               '(SELECT number FROM cards)')


# What a card may have of a server

def unsettled(db: sqlite3.Connection) -> frozenset[model.Unsettled]:
    return frozenset(_unsettled(row) for row in db.execute(
        'SELECT address, serial, ids, placed, unsettled, but_for FROM cards '
        "WHERE unsettled <> ''"))


def _unsettled(row):
    but_for = frozenset(row['but_for'].split())
    kind, _, before = row['unsettled'].partition(' ')
    if kind == _LOST:
        address = before or row['address']
        if address != row['address'] or not row['placed'] and (
                row['serial'] or row['ids']):
            return model.Unsettled(address, row['serial'], row['ids'],
                                   but_for, moved=True)
        return model.Unsettled(
            address, ids=row['ids'] if but_for else '', but_for=but_for)
    if row['serial'] and not row['placed']:
        return model.Unsettled(serial=row['serial'], but_for=but_for)
    # it may not tell its serial number any more
    return model.Unsettled(row['address'], row['serial'], row['ids'], but_for)


def settle(db: sqlite3.Connection, row: model.Unsettled) -> None:
    """Write that a card has no data of a server any more, or that a claim says
    whose."""
    which = ('serial = :serial' if row.serial
             else 'address = :address' if row.by_address and not row.moved
             else "address = :address AND serial = '' AND ids = :ids")
    db.execute(
        f"UPDATE cards SET unsettled = '', but_for = '' "
        f"WHERE unsettled IN (:kind, :kind || ' ' || :address) AND {which}", {
            'kind': _kind(row), 'address': row.address, 'serial': row.serial,
            'ids': row.ids})


def unsettle(db: sqlite3.Connection, row: model.Unsettled) -> None:
    """Write that a card may have data of a server, and no claim says so."""
    number = card(db, row.address, row.serial,
                  None if row.by_address and not row.moved else row.ids)
    before, parts = db.execute('SELECT unsettled, but_for FROM cards '
                               'WHERE number = ?', (number,)).fetchone()
    but_for, kind = row.but_for, _kind(row)
    if row.moved:
        kind = f'{kind} {row.address}'
    if before:
        but_for &= frozenset(parts.split())
        kind = before if before.startswith(_LOST) else kind
    db.execute('UPDATE cards SET unsettled = ?, but_for = ? WHERE number = ?',
               (kind, ' '.join(sorted(but_for)), number))


def _kind(row):
    return _LOST if row.by_address else _RETURNED


def unclean(db: sqlite3.Connection) -> frozenset[model.Unclean]:
    return frozenset(
        model.Unclean(handle, address, row['serial'], row['ids'], policy)
        for row in db.execute("SELECT serial, ids, unclean FROM cards "
                              "WHERE unclean <> ''")
        for handle, address, policy in json.loads(row['unclean']))


def clean(db: sqlite3.Connection, row: model.Unclean, done: bool) -> None:
    """Write down that a handle is clean, or that it is not."""
    number = card(db, row.device_address, row.serial, row.ids)
    before, = db.execute('SELECT unclean FROM cards WHERE number = ?',
                         (number,)).fetchone()
    now = [part for part in json.loads(before or '[]')
           if part[:2] != [row.handle_address, row.device_address]]
    if not done:
        now.append([row.handle_address, row.device_address, row.policy])
    db.execute('UPDATE cards SET unclean = ? WHERE number = ?',
               (json.dumps(now) if now else '', number))


def disabled(db: sqlite3.Connection) -> tuple[model.Disabled, ...]:
    return tuple(
        model.Disabled(row['address'], row['serial'], row['disabled'],
                       row['since'], row['ids'])
        for row in db.execute(
            'SELECT address, serial, disabled, since, ids FROM cards '
            'WHERE disabled IS NOT NULL ORDER BY address, serial'))
