# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Owners report devices of their servers that do not work.

``accel:report<g>=<category>: <words>`` in the metadata of a server is about the
devices of its group <g>. ``accel:report_status`` has the answer, and the key is
removed: it must not be read again on another host, about another device. For
example, after ``accel:report1=memory: Xid 63`` each device of the group 1 has
the finding ``owner_report``, until the server has released it.

A report can be wrong. Hence the severity of the finding is at most suspect, a
server can report each of its devices once a day, and operators see the words
unchanged except for control characters.
"""

from collections.abc import Iterable
import dataclasses
import datetime

from nova_accel.attach import cloud as novas
from nova_accel.attach import holdings as server_holdings
from nova_accel import exception
from nova_accel import log as logging
from nova_accel.store import claim_store
from nova_accel.store import values
from nova_accel import text

LOG = logging.getLogger(__name__)

KEY = 'accel:report'
STATUS = 'accel:report_status'
#: docs/source/tenants.rst says what they mean
CATEGORIES = ('missing', 'driver', 'memory', 'link', 'fabric', 'performance',
              'temperature', 'hang', 'data', 'other')
#: characters of the words that are kept
LONGEST = 200
_DAY = datetime.timedelta(1)


@dataclasses.dataclass(eq=False)
class OwnerReports:
    _cloud: novas.Cloud
    _store: claim_store.ClaimStore
    _holdings: server_holdings.Holdings

    def take(self, servers: Iterable[novas.Instance]) -> None:
        """Take the reports in the metadata of servers, and answer them."""
        for server in servers:
            try:
                keys = [key for key in sorted(server.metadata)
                        if key.startswith(KEY) and key != STATUS]
                # Nova works on a server with a task, and writes all metadata
                if keys and not server.task_state:
                    self._answer(server, keys)
            except Exception as error:
                LOG.error('The reports of the owner of server %s are read '
                          'later: %s', server.uuid, error,
                          exc_info=exception.without_sentence(error))

    def _answer(self, server, keys):
        said = []
        for key in keys:
            try:
                time = self._take(server, key, server.metadata[key])
                said.append(f'{text.printable(key)[1:-1]}: received {time}.')
            except exception.InvalidRequest as error:
                said.append(f'{text.printable(key)[1:-1]}: refused: {error}')
        self._cloud.set_metadata(server.uuid, STATUS, text.shortened(
            ' '.join(said), exception.FAULT))
        for key in keys:
            self._cloud.set_metadata(server.uuid, key, None)

    def _take(self, server, key, value) -> str:
        """Store a report, and return its time.

        :raises InvalidRequest: the report is refused.
        """
        claims, group = self._holdings.of(server.uuid), key.removeprefix(KEY)
        groups = sorted({claim.group for claim in claims})
        if not group and len(groups) == 1:
            group, = groups
        # a device may have several claims, one for each VF
        mine = {claim.device_address: claim for claim in claims
                if claim.group == group}
        if not mine:
            known = ', '.join(f'{KEY}{name}' for name in groups) or 'none'
            raise exception.InvalidRequest(
                f'it is for no group of accelerators of the server: write '
                f'{known}.')
        category, _, words = value.partition(':')
        category = category.strip().lower()
        if category not in CATEGORIES:
            raise exception.InvalidRequest(
                f'{text.printable(category, 20)} is not a category: write '
                f'{", ".join(CATEGORIES)}.')
        words = text.one_line(words.strip())[:LONGEST]
        # one of later is of a clock that was set back
        since, now, rows = text.now(1), text.now(), [
            row for row in self._store.owner_reports()
            if row.server == server.uuid]
        recent = {address: row for address, claim in mine.items()
                  for row in rows
                  if since < row.time <= now
                  and row.card.means(claim.card)}
        for row in recent.values():
            if (row.category, row.words) == (category, words):
                # nova-compute ended before it removed the key
                return row.time
        new = mine.keys() - recent.keys()
        if not new:
            first = min(row.time for row in recent.values())
            raise exception.InvalidRequest(
                f'each device can be reported once a day, and was at {first}: '
                f'report it again after '
                f'{datetime.datetime.fromisoformat(first) + _DAY}.')
        for address in sorted(new):
            claim = mine[address]
            self._store.add_owner_report(values.OwnerReport(
                0, now, address, claim.serial, claim.ids, claim.ports,
                server.uuid, category, words))
            LOG.warning('The owner of server %s reports device %s: %s: %s',
                        server.uuid, address, category, words)
        return now
