# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Which requests the filter counts, with objects of Nova.

What it orders is in tests/functional/test_scheduler_placement.py.
"""

import types
import unittest
from unittest import mock

from nova import objects

from nova_accel import naming
from nova_accel.scheduler import filters
from nova_accel.scheduler import scheduling

FPGA = 'CUSTOM_ACCELERATOR_FPGA'
WANTED = 'd8424dc4a4a3c413f89e433683f9040b'


class CountTest(unittest.TestCase):

    def setUp(self):
        objects.register_all()
        self.schedulings = scheduling.Schedulings(get=None)
        patch = mock.patch.object(filters, 'SCHEDULINGS', self.schedulings)
        patch.start()
        self.addCleanup(patch.stop)

    @staticmethod
    def spec(attempts=None, **specs):
        specs = specs or {f'resources1:{FPGA}': '1',
                          'accel1:function_id': WANTED}
        made = objects.RequestSpec(
            flavor=objects.Flavor(extra_specs=specs), num_instances=1,
            instance_uuid='00000000-0000-4000-8000-000000000001')
        if attempts is not None:
            made.retry = objects.SchedulerRetries(
                num_attempts=attempts, hosts=objects.ComputeNodeList())
        return made

    def filter(self, spec, count=1):
        for _ in range(count):
            filters.AcceleratorFilter().filter_all([types.SimpleNamespace(
                uuid='root', num_instances=0, allocation_candidates=[])], spec)

    @property
    def counted(self):
        trait = naming.function_trait(WANTED)
        return round(self.schedulings._demand.counts([trait])[trait])

    def test_each_request_once(self):
        self.filter(self.spec(), 2)
        self.filter(self.spec(attempts=1))
        self.assertEqual(2, self.counted)

    def test_each_server_of_a_request(self):
        spec = self.spec()
        self.filter(spec)
        spec.instance_uuid = '00000000-0000-4000-8000-000000000002'
        self.filter(spec, 2)
        self.assertEqual(2, self.counted)

    def test_not_a_retry(self):
        self.filter(self.spec(attempts=2))
        none = self.spec()
        none.retry = None
        self.filter(none)
        self.assertEqual(1, self.counted)

    def test_not_what_no_function_was_asked_of(self):
        self.filter(self.spec(**{f'resources1:{FPGA}': '1'}))
        self.filter(self.spec(**{'hw:cpu_policy': 'shared'}))
        self.assertEqual({}, self.schedulings._demand._sums)
