# Licensed under the Apache License, Version 2.0. See LICENSE.
"""A card of several regions, each with a VF for a server of its own."""

from tests.functional import base
from tests.functional import operations

PF = '0000:5e:00.0'
CARD = base.card(PF, [base.NLB0, base.NLB3], product='PAC_D5005', vfs=0)


class VirtualFunctionsTest(operations.OperationsTestBase):

    HOSTS = {'compute1': {'cards': [CARD]}}

    def setUp(self):
        super().setUp()
        self.flags(resume_guests_state_on_host_boot=True)
        self.flags(virtual_functions=[f'{PF}=2'], group='accel')

    def start_compute(self, hostname, *args, **kwargs):
        self.flags(virtual_functions=[f'{PF}=2'], group='accel')
        return super().start_compute(hostname, *args, **kwargs)

    def test_host_boot(self):
        """VFs that the kernel forgot are there before the guests start."""
        servers = {
            function: self.boot(base.fpga_flavor(function_id=function))
            for function in (base.NLB3, base.NLB0)}
        held = {f: self.assertHas(s) for f, s in servers.items()}
        self.assertEqual({base.NLB0: [('compute1', '0000:5e:00.1')],
                          base.NLB3: [('compute1', '0000:5e:00.2')]}, held)
        kernel, compute = self.kernel('compute1'), self.computes['compute1']
        compute.stop()
        for domain in compute.driver._host.get_connection()._vms.values():
            domain.destroy()
        kernel.reboot()
        self.assertFalse(kernel.exists(f'bus/pci/devices/{PF}/virtfn0'))
        self.restart_compute_service('compute1')
        for function, server in servers.items():
            self._wait_for_state_change(server, 'ACTIVE')
            self.assertEqual(held[function], self.assertHas(server))
        self.assertEqual(
            {'0000:5e:00.1', '0000:5e:00.2'},
            set(kernel.listdir('bus/pci/drivers/vfio-pci')))

    def test_other_port_is_programmed(self):
        """One region is programmed while a server has the other."""
        server = self.boot(base.fpga_flavor(function_id=base.NLB3))
        before = self.assertHas(server)
        other = self.boot(base.fpga_flavor(function_id=base.CRYPTO))
        self.assertHas(other)
        self.assertEqual(before, self.assertHas(server))
        self.delete_everything()

    def delete_everything(self):
        for server in self.api.get_servers(detail=False):
            self.api.delete_server(server['id'])
            self._wait_until_deleted(server)
        self.assertEqual([], self.claims())
