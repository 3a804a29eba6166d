# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The tables of orders, hand-overs and attempts: requests of commands to
nova-compute, cleanings after servers, and programmings of projects'
bitstreams."""

from collections.abc import Collection
import dataclasses
import sqlite3

from nova_accel.store import chain
from nova_accel.store import file
from nova_accel.store import schema
from nova_accel.store import values
from nova_accel import text

#: seconds after which an order that nova-compute has not begun is void
ORDER_SECONDS = 30
#: how many hand-overs of a device are kept
MOST_HANDOVERS = 1000
#: days for which a device's newest MOST_IN_THAT_TIME hand-overs are kept
DAYS_OF_HANDOVERS = 90
#: some hundred bytes each; a device that is claimed and released each ten
#: seconds has as many in a week
MOST_IN_THAT_TIME = 60_000
#: how many reports of owners are kept, beside those of present servers
MOST_REPORTS = 2000


class Journal(file.File):

    #: signs hand-overs; None in a copy, and without a file
    _key: chain.Key | None = None

    # Orders

    def orders(self) -> tuple[values.Order, ...]:
        """Return the pending orders of commands to nova-compute, the oldest
        first. From memory."""
        return self._known.orders

    def give_order(self, verb: str, argument: str) -> int:
        """Write an order for nova-compute, and return its number."""
        with self._transaction() as db:
            number = schema.insert(db, values.Order(
                0, verb, argument, text.moment()))
            self._change(orders=read_orders(db))
        return number

    def begin_order(self, number: int) -> bool:
        """Mark an order as begun.

        :returns: False if the order must not begin, because it was withdrawn,
            or is so old that the command that gave it has ended.
        """
        with self._transaction() as db:
            began = any(order.number == number and _is_recent(order.since)
                        for order in read_orders(db))
            if began:
                db.execute("UPDATE orders SET state = 'begun' "
                           "WHERE number = ?", (number,))
            else:
                db.execute('DELETE FROM orders WHERE number = ?', (number,))
            self._change(orders=read_orders(db))
        return began

    def answer_order(self, number: int, state: values.OrderState,
                     answer: str) -> None:
        """Store the final state of an order, and the answer."""
        with self._transaction() as db:
            db.execute('UPDATE orders SET state = ?, answer = ? '
                       'WHERE number = ?', (state.value, answer, number))
            self._change(orders=read_orders(db))

    def withdraw_order(self, number: int, states: Collection[values.OrderState],
                       ) -> values.Order | None:
        """Remove an order from the store if it is in one of these states.

        :returns: the order in its present state, or None if it was already
            removed.
        """
        with self._transaction() as db:
            found = {order.number: order
                     for order in read_orders(db)}.get(number)
            if found and found.state in states:
                db.execute('DELETE FROM orders WHERE number = ?', (number,))
            self._change(orders=read_orders(db))
        return found

    # Bitstreams of projects

    def attempts(self, project: str, seconds: float) -> frozenset[int]:
        """Return the numbers of a project's attempts to program that run or
        have failed.

        :param seconds: maximum age of an attempt, counted from its begin, or
            from its failure.

        An attempt from before the last boot of the host counts as if it had
        failed at the boot.
        """
        with self._transaction(write=False) as db:
            return frozenset(
                row['number'] for row in db.execute(
                    'SELECT number, since FROM attempts WHERE project = ?',
                    (project,)) if _age(row['since']) < seconds)

    def begin_attempt(self, project: str, seconds: float) -> int:
        """Store that the programming of a project's bitstream begins.

        If nova-compute is killed, the attempt counts as a failure at its
        beginning.

        :param seconds: maximum age of earlier attempts; older ones are
            dropped.
        :returns: the number of the attempt.
        """
        with self._transaction() as db:
            old = [(row['number'],) for row in db.execute(
                'SELECT number, since FROM attempts')
                if _age(row['since']) >= seconds]
            db.executemany('DELETE FROM attempts WHERE number = ?', old)
            return db.execute(
                'INSERT INTO attempts (project, since) VALUES (?, ?) '
                'RETURNING number', (project, text.moment())).fetchone()[0]

    def end_attempt(self, number: int, project: str, failed: bool) -> None:
        """Store the end of an attempt. A failed attempt is kept, and its age
        counts from now."""
        with self._transaction() as db:
            db.execute('DELETE FROM attempts WHERE number = ?', (number,))
            if failed:
                db.execute('INSERT INTO attempts VALUES (?, ?, ?)',
                           (number, project, text.moment()))

    # Reports of owners

    def owner_reports(self, after: int = 0) -> list[values.OwnerReport]:
        """Return the stored reports, the oldest first.

        :param after: return only reports with greater numbers.
        """
        with self._transaction(write=False) as db:
            return schema.select(
                db, values.OwnerReport, 'WHERE number > ? ORDER BY number',
                after)

    def add_owner_report(self, report: values.OwnerReport) -> None:
        """Write a report, and drop old reports. The newest MOST_REPORTS and
        all reports about servers with claims are kept. Hence no owner can
        displace the reports about other present servers.

        :param report: the report, whose number is ignored.
        """
        with self._transaction() as db:
            schema.insert(db, report)
            db.execute('DELETE FROM owner_reports WHERE number <= (SELECT '
                       'max(number) FROM owner_reports) - ? AND server NOT IN '
                       '(SELECT instance_uuid FROM claims)', (MOST_REPORTS,))

    def end_owner_reports(self, numbers: Collection[int]) -> None:
        """Write that the operator has ended reports."""
        with self._transaction() as db:
            db.executemany('UPDATE owner_reports SET ended = ? '
                           'WHERE number = ?',
                           [(text.now(), number) for number in numbers])

    # The journal of hand-overs

    def add_handover(self, handover: values.Handover) -> None:
        """Write a hand-over, and drop old hand-overs of the card.

        The newest MOST_HANDOVERS of the card are always kept. Further
        hand-overs are kept for DAYS_OF_HANDOVERS, at most MOST_IN_THAT_TIME in
        all. A failed hand-over replaces the previous failure of the same
        server and handle. Hence repeated errors do not displace other
        hand-overs.
        """
        with self._transaction() as db:
            if handover.failed:
                ends = ', '.join('?' * len(values.ENDS))
                db.execute(
                    f'DELETE FROM handovers WHERE number = (SELECT '
                    f'max(number) FROM handovers WHERE handle = ? AND server '
                    f'= ?) AND result NOT IN ({ends})',
                    (handover.handle, handover.server, *values.ENDS))
            if self._key:
                heads = schema.select(db, values.Handover, (
                    f"WHERE {schema.CARD} = ? AND place <> '' "
                    f'ORDER BY number DESC LIMIT 1'), handover.card)
                handover = chain.signed(
                    handover, heads[0] if heads else None, self._key)
            schema.insert(db, handover)
            for most, before in (
                    (MOST_HANDOVERS, text.now(DAYS_OF_HANDOVERS)),
                    (MOST_IN_THAT_TIME, '~')):
                # not by number: rows that were replaced left gaps
                db.execute(
                    f'DELETE FROM handovers WHERE {schema.CARD} = ?1 AND '
                    f'time < ?2 AND number <= (SELECT number FROM handovers '
                    f'WHERE {schema.CARD} = ?1 '
                    f'ORDER BY number DESC LIMIT 1 OFFSET ?3)',
                    (handover.card, before, most))

    def vouching(self, card: str, handle: str = '') -> values.Handover | None:
        """Return the newest hand-over after which a handle was released, or
        None. This hand-over shows the next owner how the handle was cleaned.

        :param card: values.Handover.card.
        :param handle: address of the handle, or '' for any handle of the card.
        """
        ends = [end for end in values.ENDS if end != values.EXCHANGED]
        with self._transaction(write=False) as db:
            found = schema.select(db, values.Handover, (
                f"WHERE {schema.CARD} = ? AND ? IN (handle, '') AND "
                f"place <> '' AND result IN ({', '.join('?' * len(ends))}) "
                f'ORDER BY number DESC LIMIT 1'), card, handle, *ends)
        return found[0] if found else None

    def sign_with(self, key: chain.Key, former: chain.Key | None = None,
                  ) -> int:
        """Start to sign new hand-overs with a key.

        :param former: the previous key, if the operator still has it.
        :returns: the number of cards whose chain changes to another key.
        """
        with self._transaction() as db:
            heads = schema.select(
                db, values.Handover,
                f"WHERE number IN (SELECT max(number) FROM handovers WHERE "
                f"place <> '' GROUP BY {schema.CARD})")
            new = [one for head in heads if (one := chain.announced(
                text.now(), head, key, former))]
            for one in new:
                schema.insert(db, one)
        self._key = key
        return len(new)

    def ended_handovers(self, after: int | None,
                        ) -> tuple[int, dict[str, int]]:
        """Count the hand-overs that are newer than a given one, by their
        result.

        :param after: the number of the given hand-over, or None to count
            nothing.
        :returns: the number of the newest hand-over, or 0 in an empty journal,
            and result -> count.
        """
        with self._transaction(write=False) as db:
            newest = db.execute(
                'SELECT coalesce(max(number), 0) FROM handovers').fetchone()[0]
            rows = [] if after is None else db.execute(
                'SELECT result, count(*) FROM handovers WHERE number > ? '
                'GROUP BY result', (after,)).fetchall()
        return newest, {str(result): count for result, count in rows}

    def handovers(self) -> list[values.Handover]:
        """Return all hand-overs in the journal, the oldest first."""
        with self._transaction(write=False) as db:
            return schema.select(db, values.Handover, 'ORDER BY number')


def _is_recent(moment: str) -> bool:
    """Return whether a moment() is at most ORDER_SECONDS old."""
    age = text.elapsed(moment, text.moment())
    return age is not None and age < ORDER_SECONDS


def _age(moment: str) -> float:
    """Return the seconds since a moment(), or since the last boot of the host
    if the moment was before the boot."""
    now = text.moment()
    age = text.elapsed(moment, now)
    return float(now.partition(' ')[2]) if age is None else age


def read_orders(db: sqlite3.Connection) -> tuple[values.Order, ...]:
    """Return all orders with a known state, the oldest first."""
    known = {state.value: state for state in values.OrderState}
    return tuple(
        dataclasses.replace(order, state=known[order.state])
        for order in schema.select(db, values.Order, 'ORDER BY number')
        if order.state in known)
