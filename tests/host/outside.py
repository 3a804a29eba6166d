# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The calls by which nova-compute reads and changes what outlives it.

tests.host.killed kills a process at those that change something.
tests.unit.test_outside checks that no call is missing.
"""

from collections.abc import Callable

from nova_accel import sim
from nova_accel.store import claim_store
from tests.host import cloud as clouds

#: what changes something outside of the process
CHANGES: dict[type, tuple[str, ...]] = {
    claim_store.ClaimStore: (
        'add', 'change', 'exchange', 'remove', 'set_loaded', 'place',
        'set_reserved', 'await_operator', 'add_handover', 'settle',
        'disable', 'begin_planned', 'enable', 'restore', 'set_node',
        'forget_ended', 'begin_attempt', 'end_attempt', 'set_devices',
        'change_unclean', 'set_withheld', 'count_uses', 'note_reported',
        'raise_used',
        'give_order', 'begin_order', 'answer_order',
        'withdraw_order', 'sign_with', 'add_owner_report',
        'end_owner_reports'),
    sim.SimulatedKernel: (
        'program_dfl_port', 'reset_dfl_port', 'clear_dfl_port_errors',
        'release_dfl_port', 'assign_dfl_port', 'create_mdev', 'remove_mdev',
        'reset_nvme', 'start_nvme_sanitize', 'exit_nvme_sanitize_failure',
        'format_nvme', 'restore_nvme_namespaces', 'format_nvme_vf',
        'reset_nvme_vf', 'reset_gpu', 'unbind', 'rebind', 'reset_function',
        'probe',
        'set_numvfs', 'write_attribute', 'write_timecard', 'program_xclbin',
        'close_mailbox', 'offer_xclbin', 'withdraw_xclbin', 'call'),
    clouds.Cloud: (
        'show', 'attach', 'detach', 'start_guest', 'reshape', 'carry',
        'reallocate', 'make_trait', 'remove_trait', 'set_metadata', 'notify',
        'ask_nova'),
}
#: what reads it
READS: dict[type, tuple[str, ...]] = {
    claim_store.ClaimStore: (
        'devices', 'notes', 'attempts', 'handovers', 'ended_handovers',
        'vouching', 'reserved', 'refresh', 'withheld', 'ended', 'uses', 'used',
        'owner_reports'),
    sim.SimulatedKernel: (
        'read', 'read_bytes', 'read_some', 'listdir', 'exists', 'readlink',
        'mounted_devices', 'physical_address_bits', 'vfio_module',
        'has_iova_bitmap', 'read_afu', 'read_device_serial', 'read_acs',
        'is_group_open', 'processes', 'read_firmware', 'offers_xclbin',
        'xclbin_layout',
        'read_qat_heartbeat', 'check_disks', 'read_signatures', 'read_nvme',
        'read_nvme_health', 'read_nvme_sanitize', 'read_nvme_vfs'),
    clouds.Cloud: (
        'allocations', 'consumers', 'consumers_of', 'find_providers',
        'unknown_traits', 'known_traits', 'hosts_for', 'migrations',
        'configured_classes', 'images', 'service_images', 'check_image',
        'servers', 'moves', 'open_moves', 'is_reverted', 'running',
        'guest_devices', 'carried', 'paused'),
}
#: what asks no one else: answered from memory, or a wait for any change
INSIDE: dict[type, tuple[str, ...]] = {
    claim_store.ClaimStore: (
        'keys', 'away', 'loaded', 'unsettled', 'unclean', 'disabled', 'planned',
        'claims', 'all_claims', 'by_uuid', 'lineage', 'latest', 'orders',
        'update', 'gone'),
    sim.SimulatedKernel: ('changes',),
    clouds.Cloud: ('admin_context', 'reporting'),
}


def watch(calls: dict[type, tuple[str, ...]],
          around: Callable[[type, str, Callable], Callable]) -> None:
    """Put something around calls of every object, for as long as the process
    lives.

    :param around: class, name and method -> what is called instead.
    """
    for kind, names in calls.items():
        for name in names:
            setattr(kind, name, around(kind, name, getattr(kind, name)))
