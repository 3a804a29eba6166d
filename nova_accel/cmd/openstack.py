# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The plugin of the command openstack: its commands are those of nova-accel.

OpenStackClient loads this module by the entry point openstack.cli.extension,
and reads these names of it (openstackclient.common.clientmanager, 10.5). Since
it took over Cyborg's plugin it has commands "accelerator device list" and
"accelerator arq list" of its own, which ask Cyborg's API; it skips another
module with the API_NAME accelerator, and warns before each answer of a command
with a name that is taken. Hence a name of our own, and commands whose names are
not taken.
"""

import sys

from nova_accel.cmd import tree

API_NAME = 'nova_accel'
API_VERSION_OPTION = 'os_nova_accel_api_version'
DEFAULT_API_VERSION = '2'
API_VERSIONS = {DEFAULT_API_VERSION: sys.modules[__name__]}


def make_client(instance):
    """Return no client: the commands ask Placement, Nova and Glance."""


def build_option_parser(parser):
    """Add no option to those of openstack."""
    return parser


class ListClaims(tree.Tree):
    """List which servers have which accelerators, as Placement has it.

    A line for each server and provider. Details of one host, such as the PCI
    address of each device, are shown by "nova-accel claims" there.
    """

    COLUMNS = ('Server', 'Server ID', 'Amount', 'Class', 'Function', 'Host',
               'Provider', 'Provider ID')

    def rows(self, found, servers, functions):
        self.nothing = 'No server has an accelerator.'
        return self.COLUMNS, [
            (servers.get(consumer, ''), consumer, amount,
             provider.resource_class,
             functions.get(provider.uuid)
             or self.identifier(provider.function), host, provider.name,
             provider.uuid)
            for host, providers in found.items() for provider in providers
            for consumer, amount in sorted(provider.held.items())]
