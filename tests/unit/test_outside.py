# Licensed under the Apache License, Version 2.0. See LICENSE.
"""tests.host.outside names every call that leaves nova-compute."""

import testtools

from nova_accel.attach import cloud
from nova_accel.host import kernel
from nova_accel import sim
from nova_accel.store import claim_store
from tests.host import cloud as clouds
from tests.host import outside

#: what each class promises to the rest of nova_accel
PROMISED = {
    claim_store.ClaimStore: claim_store.ClaimStore,
    sim.SimulatedKernel: kernel.Kernel,
    clouds.Cloud: cloud.Cloud,
}
#: what Nova does there, and is killed in, as well
NOVAS = {'start_guest', 'reshape'}
#: what only virt asks, which the host tier does not have
VIRTS = {'is_latest_move', 'without_iommufd'}


def public(kind):
    return {name for name in dir(kind) if not name.startswith('_')
            and callable(getattr(kind, name))}


class OutsideTest(testtools.TestCase):

    def test_each_call_is_in_one_table(self):
        for kind, promise in PROMISED.items():
            named = [name for table in (
                outside.CHANGES, outside.READS, outside.INSIDE)
                for name in table[kind] if name not in NOVAS]
            self.assertEqual(sorted(public(promise) - VIRTS), sorted(named),
                             kind.__name__)

    def test_each_call_is_one_of_the_class(self):
        for table in outside.CHANGES, outside.READS, outside.INSIDE:
            for kind, names in table.items():
                self.assertEqual([], [
                    name for name in names if not hasattr(kind, name)])
