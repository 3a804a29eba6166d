# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The plugin that adds the commands of nova-accel to the command openstack.

OpenStackClient loads this module by the entry point openstack.cli.extension
and reads these names (openstackclient.common.clientmanager, 10.5).
OpenStackClient also contains Cyborg's former plugin, with the API_NAME
accelerator and commands such as "accelerator device list", which query
Cyborg's API. OpenStackClient skips a second module with the same API_NAME, and
warns when a command runs whose name is taken. Hence this module has its own
API_NAME, and its commands have other names.
"""

import sys

from nova_accel.cmd import tree

API_NAME = 'nova_accel'
API_VERSION_OPTION = 'os_nova_accel_api_version'
DEFAULT_API_VERSION = '2'
API_VERSIONS = {DEFAULT_API_VERSION: sys.modules[__name__]}


def make_client(instance):
    """Return None: nova_accel has no API of its own, and its commands create
    their clients of Placement, Nova and Glance."""


def build_option_parser(parser):
    """Add no options to the command openstack."""
    return parser


class ListClaims(tree.Tree):
    """List which servers have which accelerators, according to Placement.

    A line for each server and provider. "nova-accel claims" on a host shows
    details, such as the PCI address of each device.
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
