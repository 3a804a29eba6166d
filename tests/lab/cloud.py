# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What the trials ask of the cloud: by the public APIs, as anybody would."""

import re
import tempfile
import time
import uuid

import openstack
import openstack.exceptions
import yaml

from nova_accel import sim
from tests.lab import machine
from tests.lab import processes

PLACEMENT = {'OpenStack-API-Version': 'placement 1.39'}
#: what the emulated card shows as the type of its region
INTERFACE = '9926ab6d-6c92-5a68-aabc-a7d84c545738'
#: of the virtual machine
PROVIDERS = {'0000:00:0c.0_region0', '0000:00:0f.0', '0000:01:00.0',
             '0000:02:00.0', '0000:03:00.0', '0000:04:00.0', 'mtty'}
#: everything is interpreted, on a machine that may have other work
PATIENCE = 1200


class Cloud:

    def __init__(self):
        self.api = openstack.connect()
        self.compute = self.api.compute

    # what is there

    def placement(self, path):
        return self.api.placement.get(path, headers=PLACEMENT).json()

    def providers(self, host='vm'):
        """Accelerators in Placement, by name without the host."""
        found = {}
        for provider in self.placement(
                '/resource_providers')['resource_providers']:
            name, uri = provider['name'], '/resource_providers/' + \
                provider['uuid']
            if not name.startswith(f'{host}_accel_'):
                continue
            traits, inventories, usages = (
                self.placement(f'{uri}/{what}').get(what)
                for what in ('traits', 'inventories', 'usages'))
            # else it has gone in between
            if None not in (traits, inventories, usages):
                found[name.removeprefix(f'{host}_accel_')] = {
                    'uuid': provider['uuid'], 'traits': set(traits),
                    'inventories': inventories, 'usages': usages}
        return found

    def functions(self, provider, host='vm'):
        """Functions that Placement shows on a region."""
        prefix = 'CUSTOM_FPGA_FUNCTION_INTEL_'
        return {trait.removeprefix(prefix).lower().replace('_', '-')
                for trait in self.providers(host)[provider]['traits']
                if trait.startswith(prefix)}

    def in_use(self, host='vm'):
        """Accelerators of which somebody has something."""
        used = {name: {c: n for c, n in p['usages'].items() if n}
                for name, p in self.providers(host).items()}
        return {name: usages for name, usages in used.items() if usages}

    def allocations(self, server, host='vm'):
        """{provider: resources} of a server, accelerators of a host only."""
        names = {p['uuid']: n for n, p in self.providers(host).items()}
        held = self.placement(f'/allocations/{server.id}')['allocations']
        return {names[rp]: a['resources'] for rp, a in held.items()
                if rp in names}

    def services(self):
        return {s.host: s.state for s in self.compute.services(
            binary='nova-compute')}

    def wait(self, what, check, seconds=PATIENCE):
        """Until check() is true, and that value.

        :raises AssertionError: when the time is over.
        """
        end = time.monotonic() + seconds
        while not (value := check()):
            if time.monotonic() > end:
                raise AssertionError(f'{what}: not after {seconds} s')
            time.sleep(1)
        return value

    def wait_ready(self, host='vm', *providers):
        """Until nova-compute is up, mapped to its cell and has reported.

        :param providers: which accelerators it has to report.
        """
        def up():
            if host in machine.HOSTS:
                machine.check_compute(host)
            elif not processes.running(f'nova-compute-{host}'):
                raise AssertionError(f'nova-compute of {host} ended:\n' +
                                     processes.tail(f'nova-compute-{host}'))
            return self.services().get(host) == 'up'
        self.wait(f'nova-compute of {host}', up)
        self.wait(f'a hypervisor of {host}', lambda: any(
            h.name == host for h in self.compute.hypervisors()))
        self.wait(f'accelerators of {host}', lambda: (
            set(providers) or PROVIDERS) <= set(self.providers(host)))

    # what is made

    def image(self, name, path, **properties):
        return self.api.image.find_image(name) or self.api.image.create_image(
            name, filename=path, wait=True, **properties)

    def probe(self, hotplug=False):
        """The image of guests that print the PCI functions they see.

        :param hotplug: they let go of devices that they are asked for.
        """
        kernel = self.image('probe-kernel', '/image/probe.elf',
                            disk_format='aki', container_format='aki',
                            visibility='public')
        with tempfile.NamedTemporaryFile() as file:
            file.truncate(1 << 20)
            return self.image(
                'probe-hotplug' if hotplug else 'probe', file.name,
                disk_format='raw', container_format='bare',
                visibility='public', kernel_id=kernel.id,
                hw_machine_type='q35',
                **({'os_command_line': 'hotplug'} if hotplug else {}))

    def bitstream(self, function=None, cut=None, properties=None, **kw):
        """Upload a bitstream of a new function; the function.

        :param properties: of the image, in place of the function.
        """
        function = function or str(uuid.uuid4())
        with tempfile.NamedTemporaryFile() as file:
            sim.make_gbs(file.name, function, kw.pop('interface', INTERFACE),
                         **kw)
            if cut:
                with open(file.name, 'r+b') as content:
                    content.truncate(cut)
            self.api.image.create_image(
                f'bitstream-{function[:8]}', filename=file.name,
                disk_format='raw', container_format='bare', wait=True,
                visibility='public',
                **(properties or {'accel:function_id': function}))
        return function

    def flavor(self, vcpus=1, **specs):
        flavor = self.compute.create_flavor(
            name=f'lab-{uuid.uuid4()}', ram=64 * vcpus, vcpus=vcpus, disk=0)
        self.compute.create_flavor_extra_specs(flavor, specs)
        return flavor

    def of_profile(self, *groups):
        """A flavor with a device profile of these groups, newly written."""
        name = f'lab-{uuid.uuid4()}'
        path = processes.RUN / f'device_profiles/{name}.yaml'
        path.write_text(yaml.safe_dump(
            {'name': name, 'groups': list(groups)}))
        return self.flavor(**{'accel:device_profile': name})

    def fpga(self, function, **more):
        """A flavor of one FPGA with that function."""
        return self.of_profile({
            'resources:CUSTOM_ACCELERATOR_FPGA': 1,
            'trait:CUSTOM_FPGA_INTEL': 'required',
            'accel:function_id': function, **more})

    def create(self, flavor, host='vm', hotplug=False, **kw):
        if host:
            kw['host'] = host
        return self.compute.create_server(
            name='probe', image_id=self.probe(hotplug).id,
            flavor_id=flavor.id, networks='none', **kw)

    def settled(self, server, status, seconds=PATIENCE):
        """The server, when it has no task left.

        :raises AssertionError: when it then has another status, with the
            fault.
        """
        def look():
            now = self.compute.get_server(server.id)
            return now if not now.task_state and now.status != 'BUILD' \
                else None
        now = self.wait(f'an end of the task of {server.id}', look, seconds)
        if now.status != status:
            raise AssertionError(f'server {now.id} is {now.status} and not '
                                 f'{status}: {self.fault(now)}')
        return now

    def boot(self, flavor, **kw):
        return self.settled(self.create(flavor, **kw), 'ACTIVE')

    def refused(self, flavor, **kw):
        """Boot what cannot be booted; (server, sentence)."""
        server = self.settled(self.create(flavor, **kw), 'ERROR')
        return server, self.fault(server)

    def fault(self, server):
        return (self.compute.get_server(server.id).fault or {}).get(
            'message', '')

    def console(self, server, mark='PROBE DONE'):
        """What the probe in the guest printed, when that is among it.

        Nova's API reads the guest's terminal besides, and writes that into
        the same file: while the guest prints, into the midst of its lines.
        """
        def look():
            _, text = machine.run(
                f'cat /lab/instances/{server.id}/console.log')
            return text if mark in text else None
        return self.wait(f'a console log of {server.id}', look).replace(
            '\r', '')

    def guest_function(self, server):
        """The function UUID that the guest read from its card."""
        found = re.findall(r'^DFL .* afu=([0-9a-f]{32})$',
                           self.console(server), re.MULTILINE)
        return [str(uuid.UUID(f)) for f in found]

    def events(self, server, action):
        """Results and details of the newest action of that name."""
        for found in self.compute.server_actions(server):
            if found.action == action:
                detail = self.compute.get_server_action(
                    found.request_id, server)
                return [(e['event'], e['result'], e.get('details') or '')
                        for e in detail.events]
        return []

    def delete(self, *servers):
        """Delete servers, and wait until they are gone."""
        for server in servers:
            self.compute.delete_server(server, ignore_missing=True)
        gone = {server.id for server in servers}
        self.wait('servers deleted', lambda: not gone & {
            s.id for s in self.compute.servers(details=False)})

    def clear(self):
        """Delete what trials made."""
        self.delete(*self.compute.servers(details=False))
        # a region is programmed with its image again, which is deleted below;
        # not for ever, as some trials have this fail
        machine.run('end=$((SECONDS + 60)); while ((SECONDS < end)) && '
                    '/opt/openstack/bin/nova-accel claims -f value -c State '
                    '| grep -q Deleting; do sleep 1; done', 120)
        for flavor in self.compute.flavors():
            self.compute.delete_flavor(flavor)
        for image in self.api.image.images():
            if image.name.startswith('bitstream-'):
                self.api.image.delete_image(image)
        for path in (processes.RUN / 'device_profiles').iterdir():
            path.unlink()
