# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Hosts and guests for whitebox-tempest-plugin and cyborg-tempest-plugin.

Their clients run commands by ssh. Here a command for a host runs on this
machine, with the libvirt of that host. Guests have no operating system: a
command that lists devices in one is answered from its XML and from the
simulated kernel of its host; in the lab, from the PCI functions that the guest
itself found and printed.
"""

import os
import re
import subprocess
import sys

from lxml import etree
from tempest.common.utils.linux import remote_client
from tempest import config
from tempest.lib import exceptions
from tempest.test_discover import plugins

from tests.lab import machine
from tests.tempest import COMPUTES, computes, domains, HERE, hosts

CONF = config.CONF


def _ask(*words) -> str:
    # nova_accel registers options where Tempest has its own
    return subprocess.run(
        [sys.executable, '-m', 'tests.tempest.computes', *words],
        stdout=subprocess.PIPE, text=True, check=True, cwd='/src').stdout


class Inside:
    """In place of a client of a guest's ssh server."""

    def __init__(self, *args, server=None, **kwargs):
        self._server = server['id']

    def validate_authentication(self):
        pass

    def exec_command(self, command):
        """List the devices of the guest, or count them."""
        if hosts.is_machine():
            return self._printed()
        found = []
        for host in COMPUTES:
            dumped = computes.virsh(host, 'dumpxml', self._server)
            if dumped.returncode:
                continue
            for hostdev in etree.fromstring(
                    domains.show(dumped.stdout)).iterfind('.//hostdev'):
                key = domains.key_of(hostdev)
                found.append(key if hostdev.get('type') == 'mdev' else
                             _ask('pci_id', host, key))
        return str(len(found)) if 'wc -l' in command else '\n'.join(found)

    def _printed(self):
        """Return the lines of the guest, as soon as it has printed all."""
        log = f'/lab/instances/{self._server}/console.log'
        return machine.check(
            f'until grep -q "PROBE DONE" {log}; do sleep 1; done; cat {log}',
            CONF.compute.build_timeout)


def execute(client, command, container_name=None, sudo=False):
    """Run a command of a host."""
    host = client.ctlplane_address
    mdev = re.search('/sys/bus/mdev/devices/([-0-9a-f]{36})', command)
    if mdev:
        return _ask('mdev_type', host, mdev[1])
    # guests have no operating system that would shut down
    command = command.replace('virsh shutdown', 'virsh destroy')
    done = subprocess.run(
        command, shell=True, capture_output=True, text=True, cwd='/src',
        env={**os.environ, 'LIBVIRT_DEFAULT_URI': computes.uri(host)})
    if done.returncode:
        raise exceptions.SSHExecCommandFailed(
            command=command, exit_status=done.returncode, stderr=done.stderr,
            stdout=done.stdout)
    if 'dumpxml' in command:
        return domains.show(done.stdout)
    return done.stdout


class Plugin(plugins.TempestPlugin):

    def load_tests(self):
        # not before: it reads the configuration
        from whitebox_tempest_plugin.services import clients
        clients.SSHClient.execute = execute
        remote_client.RemoteClient = Inside
        # a directory without tests
        return str(HERE / 'conf'), str(HERE / 'conf')

    def register_opts(self, conf):
        pass

    def get_opt_lists(self):
        return []
