# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Having drivers bring back quarantined regions of unused cards."""

from collections.abc import Callable, Mapping

from nova_accel import conf
from nova_accel.drivers import base
from nova_accel import exception
from nova_accel.inventory import cards as card_calls
from nova_accel.inventory import devices
from nova_accel import locks
from nova_accel import log as logging
from nova_accel import model
from nova_accel.store import claim_store

CONF = conf.CONF
LOG = logging.getLogger(__name__)


class Recovery:

    def __init__(self, table: devices.DeviceTable, cards: card_calls.Cards,
                 store: claim_store.ClaimStore, claiming: locks.Lock,
                 drivers: Mapping[str, base.AcceleratorDriver]):
        self._table = table
        self._cards = cards
        self._store = store
        self._claiming = claiming
        self._drivers = drivers
        #: address -> the reasons for which a recovery has been tried
        self._tried: dict[str, list[str]] = {}

    def run(self, in_use: Callable[[str], bool]) -> list[str]:
        """See Inventory.recover().

        A programming that failed just before nova-compute was killed leaves
        such regions, and others that a guest of the same card prevented from
        being brought back at once.

        :returns: addresses of the cards that are to be scanned.
        """
        batch = self._cards.batch(CONF.accel.programming_timeout)
        chosen = []
        for address, reasons in self._candidates().items():
            device = self._table.told(address)
            try:
                if device is None or not self._quarantine(address, in_use):
                    continue
            except exception.AcceleratorError as error:
                # nobody knows whether a server has it
                LOG.error('Device %s is not recovered: %s', address, error)
                continue
            chosen.append(address)
            self._tried[address] = reasons
            LOG.info('Device %s is recovered: %s', address,
                     '; '.join(reasons))
            batch.add(address, f'Recovering {address}',
                      self._drivers[device.driver].recover, address,
                      about=address)
        for call in batch:
            try:
                call.outcome()
            except Exception as error:
                LOG.error('Device %s could not be recovered: %s', call.about,
                          error)
            self._table.invalidate(call.about)
            self._table.unfence(call.about, devices.Fence.RECOVERY)
        return chosen

    def _candidates(self) -> dict[str, list[str]]:
        found = {}
        for address, device in self._table.snapshot().items():
            reasons = sorted(r.reason for r in device.regions
                             if r.health is model.Health.QUARANTINED)
            if device.health is model.Health.OK and not reasons:
                # it is well, and the same may happen to it again
                self._tried.pop(address, None)
            if (device.health is model.Health.OK and reasons
                    and reasons != self._tried.get(address)
                    and device.driver in self._drivers
                    and not self._table.is_programming(address)
                    and not self._cards.is_busy(address)):
                found[address] = reasons
        return found

    def _quarantine(self, address: str, in_use: Callable[[str], bool],
                    ) -> bool:
        """Give nothing more of a card; False where something of it is in
        use."""
        with self._claiming:
            if in_use(address) or any(c.device_address == address
                                      for c in self._store.claims()):
                return False
            return self._table.fence(address, devices.Fence.RECOVERY,
                                     'it is being recovered')
