# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The rows of durable holds, inside a transaction.

What the columns of a row contain depends on the kind of the hold:

=============  =================  ====================  =====================
kind           part               address               about
=============  =================  ====================  =====================
disabled       ''                 planned time, or ''   reason
defective      ''                 ''                    reason
planned        ''                 planned time          reason
owner-unknown  ''                 card's former address ''
returned       ''                 card's former address ''
unclean        address of the     card's former address policy of the
               handle                                   hand-over
=============  =================  ====================  =====================

A hold without a part is of the whole card. The *former address* is the address
of the card when a server had it. A card has at most one hold of each kind and
part, and not both owner-unknown and returned. For cards with one of these two
holds, the table ``settled`` has the parts that no longer contain data of a
server. inventory.holds describes the kinds.
"""

import sqlite3

from nova_accel.store import rows
from nova_accel.store import values
from nova_accel import text

DISABLED, DEFECTIVE, PLANNED = 'disabled', 'defective', 'planned'
UNCLEAN = 'unclean'
OWNER_UNKNOWN, RETURNED = 'owner-unknown', 'returned'
#: kinds of which a card has only one
_GROUPS = ((DISABLED,), (DEFECTIVE,), (PLANNED,),
           (OWNER_UNKNOWN, RETURNED), (UNCLEAN,))
#: last part of a query on holds and cards
_JOIN = 'FROM holds JOIN cards ON card = number WHERE kind'


def _add(db, number, kind, part='', address='', about='', since=''):
    db.execute('INSERT OR REPLACE INTO holds (card, kind, part, address, '
               'about, since) VALUES (?, ?, ?, ?, ?, ?)',
               (number, kind, part, address, about, since or text.now()))


def _lift(db, kinds, which, **names):
    """Remove the holds of some kinds that meet a condition.

    :param which: the condition in SQL, on the columns of holds and cards.
    :param names: the values of the names in which.
    """
    db.execute(
        f'DELETE FROM holds WHERE rowid IN (SELECT holds.rowid {_JOIN} IN '
        f'({_quoted(kinds)}) AND {which})', names)
    db.execute(
        f'DELETE FROM settled WHERE card NOT IN (SELECT card FROM holds '
        f'WHERE kind IN ({_quoted((OWNER_UNKNOWN, RETURNED))}))')


def _quoted(kinds):
    return ', '.join(f"'{kind}'" for kind in kinds)


# Cards whose row changes


def copy(db: sqlite3.Connection, number: int, other: int) -> None:
    """Copy all holds of the card in row number to the row other."""
    db.execute('INSERT INTO holds (card, kind, part, address, about, since) '
               'SELECT ?, kind, part, address, about, since FROM holds '
               'WHERE card = ?', (other, number))
    db.execute('INSERT INTO settled SELECT ?, part FROM settled '
               'WHERE card = ?', (other, number))


def move(db: sqlite3.Connection, number: int, other: int) -> None:
    """Move the holds of one row to another row of the same card.

    If both rows have holds of the same group of kinds (_GROUPS), the holds of
    the old row are dropped, except unclean handles.

    :param number: the old row.
    :param other: the new row.
    """
    for kinds in _GROUPS:
        names = _quoted(kinds)
        if kinds == (UNCLEAN,) or not db.execute(
                f'SELECT 1 FROM holds WHERE card = ? AND kind IN ({names})',
                (other,)).fetchone():
            db.execute(f'UPDATE OR IGNORE holds SET card = ? WHERE card = ? '
                       f'AND kind IN ({names})', (other, number))
            if OWNER_UNKNOWN in kinds:
                db.execute('UPDATE OR IGNORE settled SET card = ? '
                           'WHERE card = ?', (other, number))
    # SQLite gives the number of the last row again
    for table in 'holds', 'settled':
        db.execute(f'DELETE FROM {table} WHERE card = ?', (number,))


# Data of servers


def unsettled(db: sqlite3.Connection) -> frozenset[values.Unsettled]:
    """Return the cards that may contain data of a server."""
    settled: dict[int, set[str]] = {}
    for row in db.execute('SELECT card, part FROM settled'):
        settled.setdefault(row['card'], set()).add(row['part'])
    return frozenset(
        _unsettled(row, frozenset(settled.get(row['number'], ())))
        for row in db.execute(
            f'SELECT number, kind, cards.address, serial, ids, ports, placed, '
            f'holds.address AS had_at, since {_JOIN} IN '
            f'({_quoted((OWNER_UNKNOWN, RETURNED))})'))


def _unsettled(row, settled):
    since = row['since']
    if row['kind'] == OWNER_UNKNOWN:
        had_at = row['had_at']
        if had_at != row['address'] or not row['placed'] and (
                row['serial'] or row['ids']):
            return values.Unsettled(had_at, row['serial'], row['ids'],
                                    settled, True, since, row['ports'])
        return values.Unsettled(had_at, ids=row['ids'] if settled else '',
                                settled=settled, since=since)
    if row['serial'] and not row['placed']:
        return values.Unsettled(
            serial=row['serial'], settled=settled, since=since)
    # it may not report its serial number any more
    return values.Unsettled(row['address'], row['serial'], row['ids'], settled,
                            since=since, ports=row['ports'])


def settle(db: sqlite3.Connection, row: values.Unsettled) -> None:
    """Remove the hold of a card that may contain data of a server, because the
    card is clean, or because the server of the data has a claim."""
    if row.serial:
        which = 'serial = :serial'
    elif row.by_address and not row.moved:
        # not an absent card that was at the address before
        which = "cards.address = :address AND (placed OR serial || ids = '')"
    elif row.ports:
        which = "serial = '' AND ids = :ids AND ports = :ports"
    else:
        which = "cards.address = :address AND serial = '' AND ids = :ids"
    if row.by_address:
        which += ' AND holds.address = :address'
    _lift(db, (_kind(row),), which, address=row.address, serial=row.serial,
          ids=row.ids, ports=row.ports)


def unsettle(db: sqlite3.Connection, row: values.Unsettled) -> None:
    """Write that a card may contain data of a server without a claim."""
    number = rows.card(db, row.address, row.serial,
                       None if row.by_address and not row.moved else row.ids,
                       row.ports)
    before = db.execute(
        f'SELECT kind FROM holds WHERE card = ? AND kind IN '
        f'({_quoted((OWNER_UNKNOWN, RETURNED))})', (number,)).fetchone()
    if before:
        db.executemany(
            'DELETE FROM settled WHERE card = ? AND part = ?',
            [(number, part)
             for part in _settled(db, number) - row.settled])
        if before['kind'] == OWNER_UNKNOWN:
            return
        db.execute('DELETE FROM holds WHERE card = ? AND kind = ?',
                   (number, RETURNED))
    else:
        db.executemany('INSERT INTO settled (card, part) VALUES (?, ?)',
                       [(number, part) for part in row.settled])
    _add(db, number, _kind(row), address=row.address)


def _settled(db, number):
    return {row['part'] for row in db.execute(
        'SELECT part FROM settled WHERE card = ?', (number,))}


def _kind(row):
    return OWNER_UNKNOWN if row.by_address else RETURNED


def unclean(db: sqlite3.Connection) -> frozenset[values.Unclean]:
    """Return the unclean handles."""
    return frozenset(
        values.Unclean(row['part'], row['address'], row['serial'], row['ids'],
                       row['about'], row['since'], row['ports'])
        for row in db.execute(
            f'SELECT part, holds.address, serial, ids, about, since, ports '
            f'{_JOIN} = ?', (UNCLEAN,)))


def set_unclean(db: sqlite3.Connection, row: values.Unclean) -> None:
    """Write that a handle is unclean."""
    _add(db, _card_of(db, row), UNCLEAN, row.handle_address,
         row.device_address, row.policy)


def set_clean(db: sqlite3.Connection, row: values.Unclean) -> None:
    """Write that a handle is clean."""
    db.execute('DELETE FROM holds WHERE card = ? AND kind = ? AND part = ?',
               (_card_of(db, row), UNCLEAN, row.handle_address))


def _card_of(db, row):
    return rows.card(db, row.device_address, row.serial, row.ids, row.ports)


# Disabled devices


def disabled(db: sqlite3.Connection) -> dict[str, tuple[values.Disabled, ...]]:
    """Return the rows of disabled and planned devices, ordered by address.

    :returns: 'disabled' and 'planned' -> rows. A planned row whose time has
        come is in 'disabled'.
    """
    found = [(row.is_planned, row) for row in (
        values.Disabled(row['address'], row['serial'], row['about'],
                        row['since'], row['ids'], row['kind'] == DEFECTIVE,
                        row['ports'], row['at'], row['kind'] == DISABLED)
        for row in db.execute(
            f'SELECT cards.address, serial, about, since, ids, kind, ports, '
            f'holds.address AS at '
            f'{_JOIN} IN ({_quoted((DISABLED, DEFECTIVE, PLANNED))}) '
            f'ORDER BY cards.address, serial, kind DESC'))]
    return {'disabled': tuple(row for is_planned, row in found
                              if not is_planned),
            'planned': tuple(row for is_planned, row in found if is_planned)}


def disable(db: sqlite3.Connection, row: values.Disabled) -> None:
    """Write that a card is disabled, now or at a planned time. The card is
    identified by its serial number, or by its address if the row has no
    number."""
    _add(db, rows.card(db, row.device_address, row.serial), _word(row),
         address=row.at, about=row.reason, since=row.since)


def enable(db: sqlite3.Connection, row: values.Disabled) -> None:
    """Write that a card is not disabled any more."""
    # a planned row may have begun since it was read
    _lift(db, (PLANNED, DISABLED) if row.at else (_word(row),),
          "serial = :serial AND (:serial <> '' OR cards.address = :address "
          "AND :ids IN ('', ids)) AND :at IN ('', holds.address)",
          serial=row.serial, address=row.device_address, ids=row.ids,
          at=row.at)


def begin_planned(db: sqlite3.Connection) -> None:
    """Mark the cards whose planned time has come as disabled."""
    db.execute('UPDATE OR REPLACE holds SET kind = ? WHERE kind = ? AND '
               'address <= ?', (DISABLED, PLANNED, text.now()))


def _word(row):
    return PLANNED if row.at else DEFECTIVE if row.of_health else DISABLED
