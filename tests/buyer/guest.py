# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Answers ssh in place of the simulated guests, by what their XML has.

The suite logs in to the address of a server. All addresses are of this
machine, in the network that __main__ makes.
"""

import contextlib
import socketserver
import threading
import time

import fixtures
from nova import context
from nova import objects
from nova.tests.fixtures import libvirt as fakelibvirt
import paramiko

from tests.functional import base

PORT = 22


class Boots(fixtures.Fixture):
    """When each guest was booted: UUID -> time."""

    def _setUp(self):
        self.times = {}
        create = fakelibvirt.Domain.createWithFlags

        def created(domain, *args, **kwargs):
            self.times[domain.UUIDString()] = time.monotonic()
            return create(domain, *args, **kwargs)
        self.useFixture(fixtures.MockPatchObject(
            fakelibvirt.Domain, 'createWithFlags', created))


class Guest(paramiko.ServerInterface):
    """The side of the server in a connection."""

    def __init__(self, cloud, server):
        self._cloud = cloud
        self._server = server

    def get_allowed_auths(self, username):
        return 'publickey'

    def check_auth_publickey(self, username, key):
        instance = objects.Instance.get_by_uuid(
            context.get_admin_context(), self._server['id'],
            expected_attrs=['keypairs'])
        return (paramiko.AUTH_SUCCESSFUL if key.get_base64() in (
            pair.public_key.split()[1] for pair in instance.keypairs)
            else paramiko.AUTH_FAILED)

    def check_channel_request(self, kind, chanid):
        return paramiko.OPEN_SUCCEEDED

    def check_channel_exec_request(self, channel, command):
        # after the reply to this request, which paramiko sends next
        threading.Timer(0.2, self._answer, (
            channel, command.decode())).start()
        return True

    def _answer(self, channel, command):
        lines = self._lines(command)
        if lines is None:
            status, text = 127, ''
        else:
            if '| wc -l' in command:
                lines = [str(len(lines))]
            elif '| head -1' in command:
                del lines[1:]
            status, text = 0, ''.join(f'{line}\n' for line in lines)
        channel.sendall(text.encode())
        channel.send_exit_status(status)
        channel.close()

    def _lines(self, command):
        if command.startswith('nvidia-smi'):
            # fields that only a driver knows are not reported
            name = '--query-gpu=name ' in command
            return [ids if name else '[N/A]' for ids in self.gpus()]
        if command.startswith('cat /proc/uptime'):
            booted = self._cloud.boots.times[self._server['id']]
            return [f'{time.monotonic() - booted:.2f}']
        return {"echo 'test'": ['test'], 'uname -a': ['Linux']}.get(command)

    def gpus(self):
        """Return the ids of the GPUs in the XML of the guest."""
        kernel = self._cloud.simulated(
            self._server['OS-EXT-SRV-ATTR:host'])
        for address in base.hostdev_addresses(
                self._cloud.guest_xml(self._server)):
            at = f'bus/pci/devices/{address}'
            if kernel.read(f'{at}/class').startswith('0x03'):
                yield ':'.join(kernel.read(f'{at}/{name}').strip()
                               for name in ('vendor', 'device'))


def serve(cloud):
    """Answer at the addresses of all servers of the cloud."""
    host_key = paramiko.RSAKey.generate(2048)

    class Handler(socketserver.BaseRequestHandler):

        def handle(self):
            address, _ = self.request.getsockname()
            server = next((s for s in cloud.admin_api.get_servers()
                           if any(a['addr'] == address
                                  for found in s['addresses'].values()
                                  for a in found)), None)
            if not server or not cloud.domain(server).isActive():
                return
            transport = paramiko.Transport(self.request)
            transport.add_server_key(host_key)
            # the client goes away
            with contextlib.suppress(paramiko.SSHException, EOFError):
                transport.start_server(server=Guest(cloud, server))
                transport.join()

    server = socketserver.ThreadingTCPServer(('', PORT), Handler)
    server.daemon_threads = True
    cloud.addCleanup(server.server_close)
    cloud.addCleanup(server.shutdown)
    threading.Thread(target=server.serve_forever, daemon=True).start()
