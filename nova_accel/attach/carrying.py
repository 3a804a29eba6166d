# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Write, compare and read the claims that guests carry in their metadata.

When Nova defines a guest, the text is a part of its XML. The text is written
again if claims change while the guest exists. If nova-compute is killed
between a change of claims and this write, attach.reconcile writes the text
later.
"""

from nova_accel.attach import carried
from nova_accel.attach import cloud as novas
from nova_accel.attach import holdings as server_holdings
from nova_accel import locks
from nova_accel import log as logging
from nova_accel import model
from nova_accel.store import claim_store

LOG = logging.getLogger(__name__)


class Carrying:

    def __init__(self, store: claim_store.ClaimStore,
                 holdings: server_holdings.Holdings, cloud: novas.Cloud):
        self._store = store
        self._holdings = holdings
        self._cloud = cloud
        #: held while texts are created and written, so the newest is written
        #: last
        self._lock = locks.Lock('guests')
        #: ClaimStore.latest() when every guest carried its claims
        self._complete: tuple[str, int] | None = None

    def text_of(self, server_uuid: str) -> str:
        """Return the claims of a server as text for the metadata of its guest,
        or '' if the server has no claims."""
        claims = self._claims(server_uuid)
        return carried.as_text(self._carried(claims)) if claims else ''

    def _claims(self, server_uuid):
        # including its claims from before a move
        return [claim for role in model.Role
                for claim in self._holdings.of(server_uuid, role)]

    def _carried(self, claims):
        return carried.Carried(
            self._store.lineage().node, *self._store.latest(), tuple(claims))

    def update(self, server_uuid: str) -> None:
        """Write the claims of a server into its guest, if libvirt has a guest.

        Raises nothing: after an error, the next comparison tries again.
        """
        try:
            with self._lock:
                self._cloud.carry(server_uuid, self.text_of(server_uuid))
        except Exception as error:
            self._complete = None
            LOG.warning('The present claims of server %s could not be written '
                        'into its guest (%s); that is tried again at the next '
                        'comparison', server_uuid, error)

    def run(self) -> None:
        """Update the text in each guest whose text lacks the present claims of
        its server.

        :raises Exception: libvirt does not answer.
        """
        latest = self._store.latest()
        if latest == self._complete:
            return
        self._complete = latest
        for server_uuid, text in self._cloud.carried().items():
            if self._is_late(server_uuid, text):
                self.update(server_uuid)

    def _is_late(self, server_uuid, text):
        claims = self._claims(server_uuid)
        try:
            there = carried.parse(text, server_uuid) if text else None
        except carried.Refused:
            # devices that this host does not report are withheld already
            return bool(claims)
        if not claims:
            # attach.settling handles claims that the store has not seen yet
            return there is not None and self._store.lineage().knows(
                there.run, there.changes)
        return (there is None or there.content != self._carried(claims).content
                or not self._store.lineage().knows(there.run, there.changes))

    def read(self, node: str) -> tuple[dict[str, carried.Carried],
                                       dict[str, str]]:
        """Return the claims of guests whose text is newer than the store.

        :param node: provider uuid of this compute node.
        :returns: (server uuid -> usable claims, server uuid -> the reason why
            the claims are unusable).
        :raises Exception: libvirt does not answer.
        """
        found, refused = {}, {}
        for server_uuid, text in self._cloud.carried().items():
            if not text:
                continue
            try:
                there = carried.parse(text, server_uuid)
                if self._store.lineage().knows(there.run, there.changes):
                    continue
                if there.node != node:
                    raise carried.Refused(
                        f'they are of compute node {there.node}, and this one '
                        f'is {node}')
                found[server_uuid] = there
            except carried.Refused as error:
                refused[server_uuid] = str(error)
        return found, refused
