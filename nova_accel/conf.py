# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The options of nova_accel, in the section [accel] of nova.conf."""

import difflib
import glob
import importlib.util
import os
import socket

from oslo_config import cfg

GROUP = cfg.OptGroup('accel', title='Accelerators', help="""
Accelerators, which nova-compute reports, programs and attaches, and
among which nova-scheduler chooses.""")

#: about devices
_DEVICE_OPTS = [
    cfg.ListOpt('enabled_drivers', default=[], help="""
Drivers that find devices on this host, by entry point name in
nova_accel.drivers, for example ``dfl``. Devices of other drivers are ignored.
Read by nova-compute and nova-accel."""),
    cfg.StrOpt('simulated_host', help="""
Path of a YAML file with a simulated host, or of a file of ``nova-accel
capture``, whose devices replace those of the machine, for trials of Placement
and the scheduler without hardware. libvirt refuses such devices: no server
starts with one. nova-compute writes the state of the devices into the
directory of the file. If the path names a directory, nova-compute uses the
file ``<host>.yaml`` in it, where <host> is [DEFAULT] host."""),
    cfg.StrOpt('resource_classes', default='custom',
               choices=[('custom', 'CUSTOM_ACCELERATOR_<TYPE>'),
                        ('standard', 'FPGA, PGPU, VGPU if os-resource-'
                                     'classes has one for the type')], help="""
Spelling of the resource classes of accelerators in Placement. Set the same
value for every nova-compute, nova-api and nova-scheduler. Do not change it on
a host while servers have accelerators."""),
    cfg.StrOpt('owner_trait', default='OWNER_CYBORG',
               regex='^(OWNER_CYBORG|CUSTOM_[A-Z0-9_]{1,248})$', help="""
Trait by which the providers of nova_accel differ from those of Nova's own PCI
and vGPU code: OWNER_CYBORG, or a trait of yours that begins with
``CUSTOM_``."""),
    cfg.MultiStrOpt('function_class', default=[], help="""
``<CLASS>:<function UUID>``: a region that carries this function has the trait
CUSTOM_FPGA_<CLASS>, for example CUSTOM_FPGA_NETWORK. May be given several
times. Example: ``COMPUTE:d8424dc4-a4a3-c413-f89e-433683f9040b``."""),
    cfg.ListOpt('fixed_devices', default=[], help="""
PCI addresses of FPGA cards that nova-compute never programs. Servers get these
cards with their present function."""),
    cfg.ListOpt('whole_cards', default=[], help="""
PCI addresses of FPGA cards that servers get completely, and may program, reset
and flash. With DFL, the card must have one port and no VFs; guests get its
physical function. With XRT, give the address of the management function;
nova-compute then does not restrict the mailbox of the card. nova-compute
treats the content of such a card as that of the server's project, and replaces
it before another server gets the card. Example: ``0000:5e:00.0``."""),
    cfg.MultiStrOpt('include_devices', default=[], help="""
Rules that select devices. The drivers gpu and nvme offer only devices that
match a rule. Each other driver offers all its devices; but if a rule matches
one of them, the driver offers only devices that match a rule. A rule is a list
of ``key=value`` pairs with the keys address (PCI), vendor and product (four
hex digits), and subsystem (``10de:1533``), which distinguishes boards of one
product. All pairs must match; ``*`` and ``?`` are wildcards. May be given
several times. Example: ``vendor=8086 product=09c4``."""),
    cfg.MultiStrOpt('exclude_devices', default=[], help="""
Devices that match one of these rules are not offered, even if include_devices
matches too. An address can also be that of a single VF. Example:
``address=0000:3b:*``."""),
    cfg.ListOpt('virtual_functions', default=[], help="""
``<PCI address of a physical function>=<number>``: number of VFs that
nova-compute creates for devices of the drivers dfl, gpu, qat, nvme, vgpu and
pci: at its start, and later if no server has the device. Existing VFs are not
changed. Example: ``0000:3d:00.0=16``."""),
    cfg.ListOpt('vgpu_types', default=[], help="""
Types of vGPUs that servers can get, in order of preference, by the vendor's
name. The name in mdev_supported_types and the number are accepted too, but an
update of the host may change them. Items ``<PCI address>=<type>`` replace the
other items for that GPU. By default, servers can get every type of the GPU.
Example: ``A40-2Q,0000:41:00.0=L40S-4Q``."""),
    cfg.ListOpt('xe_quotas', default=[], help="""
Limits of each VF of an Intel GPU with the kernel driver xe, ``<PCI address of
the GPU>/<attribute>=<number>``: ``vram_quota`` (bytes, Linux 7.0),
``exec_quantum_ms`` and ``preempt_timeout_us`` (6.19). nova-compute writes them
before it creates the VFs. By default, the VFs have equal parts of the memory,
and no limit of computing time. Example: ``0000:03:00.0/vram_quota=4294967296,
0000:03:00.0/exec_quantum_ms=20``."""),
    cfg.StrOpt('pools', default='host',
               choices=[('host', 'all equal devices share one'),
                        ('numa_node', 'those of each NUMA node share one'),
                        ('none', 'each device has its own')], help="""
Which equal devices share a resource provider in Placement. Devices of the
drivers gpu, nvme, pci and qat are equal if they have the same type, product,
driver and traits. A request group gets its devices from one provider: with
``numa_node``, use two groups for devices of two nodes. With ``none``,
Placement takes minutes for a server that requests eight devices, or does not
finish. After a change, nova-compute moves the allocations of servers at its
next start. FPGA regions and cards with vGPUs always have their own
providers."""),
    cfg.MultiStrOpt('device_sets', default=[], help="""
PCI addresses of devices that servers get only together, separated by spaces,
for example the GPUs of a partition of NVSwitches. A set has its own resource
provider, from which a request group gets all devices or none: for a set of
four GPUs, ``resources1:CUSTOM_ACCELERATOR_GPU=4``. The devices of a set must
be of one type, and offered whole (drivers gpu, nvme and pci) or by exactly one
VF, for example GPUs of AMD with gim. A device can be in one set only. May be
given several times. Example: ``0000:1a:00.0 0000:1b:00.0 0000:1c:00.0
0000:1d:00.0``."""),
    cfg.StrOpt('fabric_command', help="""
How nova-compute activates the partition of a set of GPUs under NVSwitches
before the guest of the set starts, and deactivates it afterwards. With
``libnvfm``, it calls the library of NVIDIA's Fabric Manager at 127.0.0.1:6666;
with ``libnvfm:<address>``, at <IPv4 address>:<port> or at the path of a
socket. Both need gpu_modules. With an absolute path, nova-compute runs this
command as its own user, one at a time. The arguments are ``activate`` or
``deactivate``, and the sorted PCI addresses of the set. The command must exit
with 0 if the partition is in this state at its end. With ``static``,
partitions are never changed. Without this option, such sets are not offered.
With ``static``, vGPUs of such GPUs are offered too; with ``libnvfm``, only
vGPUs that have all of a GPU. Example: ``libnvfm``."""),
    cfg.ListOpt('gpu_modules', default=[], help="""
``<PCI address of a GPU>=<module>``: the number by which NVIDIA's Fabric
Manager identifies the GPU, shown as ``Module ID`` by ``nvidia-smi -q`` while
the GPU is bound to NVIDIA's driver. It does not follow from the order of the
addresses. Example: ``0000:1a:00.0=2,0000:1b:00.0=4``."""),
    cfg.IntOpt('discovery_interval', default=60, min=1, help="""
Maximum number of seconds between two looks of nova-compute for added and
removed devices, and between two readings of the health of devices.
nova-compute reads signals of the bus three times as often, and handles events
of the kernel at once."""),
    cfg.IntOpt('discovery_timeout', default=60, min=1, help="""
Seconds that a scan may take. nova-compute scans all devices in parallel. A
device that takes longer is fenced. At its start, nova-compute waits for
devices at most for this time."""),
    cfg.ListOpt('health', default=['observe'], help="""
How nova-compute reacts to problems of devices: ``<mode>`` for all signals,
``<signal>=<mode>`` for one. With ``observe`` it logs findings, and commands
show them; nothing else changes. With ``act``, in addition, suspect devices
have the trait CUSTOM_ACCELERATOR_SUSPECT and servers get them last,
quarantined devices are withheld, and owners are informed; signals that the
documentation marks as new stay with ``observe`` unless you name them. With
``off`` nova-compute reads no signals. Example: ``act,link_speed=off``."""),
    cfg.StrOpt('heal', default='off',
               choices=[('off', 'servers stay where they are'),
                        ('observe', 'nova-compute reports which servers it '
                                    'would migrate'),
                        ('cold', 'they are stopped, migrated and started'),
                        ('live', 'they are migrated while they run')],
               help="""
What nova-compute does with a server whose device is gone or has failed for a
discovery_interval: it asks Nova to migrate the server to another host with
room, as the user of ``[service_user]``, who needs the role admin. It migrates
one server of a host at a time, and each server once for one cause. It migrates
no server if at least two devices, and half of their kind, fail together, nor
for a day after a failed migration. Only signals for which ``health`` is
``act`` count as failures."""),
    cfg.IntOpt('heal_per_day', default=3, min=1, help="""
Maximum number of migrations that ``heal`` begins in a day (UTC), on all hosts
together. Set the same value on all hosts."""),
    cfg.StrOpt('metrics_file', help="""
Absolute path of a file for the textfile collector of node_exporter, with
metrics of the state and use of devices. nova-compute replaces the file each
discovery_interval, and when the health of a device changes. The name must end
in ``.prom``, and nova-compute must be able to write into the directory. By
default no file is written. Example:
``/var/lib/prometheus/node-exporter/nova_accel.prom``."""),
    cfg.StrOpt('metrics_group', help="""
Group that may read metrics_file (mode 0640), which then also has the use of
devices by project. The users of node_exporter and of nova-compute must be
members. Without this option, the file has no projects, and every user can read
it. Example: ``prometheus``."""),
    cfg.IntOpt('device_timeout', default=30, min=1, help="""
Seconds that a build or a delete waits for a call to a device, for example for
a reset or the creation of a vGPU. If the call takes longer, no server gets the
device before the call has ended."""),
    cfg.IntOpt('runtime_programming_interval', default=30, min=1, help="""
Interval in seconds at which nova-compute reads the metadata of servers, for
example a bitstream that their owner requests by ``accel:bitstream_id``.
nova-compute reads these images with the credentials of [service_user]."""),
    cfg.IntOpt('runtime_programming_pause', default=60, min=0, help="""
Minimum number of seconds between two programmings of the same region at run
time. A request within this time waits, and does not delay other servers."""),
    cfg.IntOpt('programming_timeout', default=300, min=1, help="""
Seconds that programming a region may take. A region that takes longer is
quarantined until its driver reports it again."""),
    cfg.ListOpt('handover', default=[], help="""
How devices are cleaned after a server, before another one gets them:
``<policy>`` for all devices, ``<driver>=<policy>`` for those of a driver,
``<key>=<value> ...=<policy>`` for those that match these pairs as a rule of
``include_devices``, ``<PCI address>=<policy>`` for one. An address takes
precedence over rules, and the first rule that matches over the driver.
Policies are ``clear`` (the default), which resets the device and erases the
state that the server left; ``reset``, which only resets it; ``bus``, which is
``clear`` with a reset of the bus; ``shown``, which is ``bus`` and requires
that the GPU reports its memory as clear; ``none``; and ``operator``, with
which the device is withheld until the operator releases it. If cleaning fails,
no server gets the device. Example: ``clear,gpu=reset,vendor=144d
product=a8*=none,0000:3b:00.0=operator``."""),
    cfg.MultiStrOpt('pci_devices', default=[], help="""
Devices of the driver ``pci``, by rules of ``key=value`` pairs. These keys
select devices: vendor and product (four hex digits), subsystem
(``10de:1533``), class (six hex digits), address (PCI), driver (of the kernel).
All pairs must match; ``*`` and ``?`` are wildcards. These keys describe them:
type (required) sets the resource class CUSTOM_ACCELERATOR_<type>; traits adds
traits, separated by commas; name replaces the product's id in traits;
``vfs=together`` offers all VFs of a function as one accelerator. The first
rule that matches applies. May be given several times. Example: ``vendor=1da3
product=10?? type=AI traits=CUSTOM_AI_TRAINING name=GAUDI``."""),
    cfg.MultiStrOpt('device_traits', default=[], help="""
Additional traits of devices, which flavors can require or prefer
(``accel1:prefer``), by rules of ``key=value`` pairs. vendor, product,
subsystem and address select devices as in ``include_devices``; ``traits``
(required) lists custom traits, separated by commas. A device gets the traits
of all rules that match. May be given several times. Example: ``vendor=10de
product=26b9 traits=CUSTOM_TIER_GOLD``."""),
    cfg.ListOpt('near', default=[], help="""
Domains of this host, ``<level>=<domain>``, the nearest level first, for
servers that must be near each other (``accel:near`` of flavors). You choose
the names of levels, in lower-case letters and digits; a host is in one domain
of each level. A domain is a trait that begins with ``CUSTOM_NEAR_<LEVEL>_``;
or the absolute path of a file that contains the name of the trait, or of a
command that prints this name; or, for the level ``nvlink``, ``auto``: the
cluster and clique that NVIDIA's driver reports. Files and commands are read
each discovery_interval. Example:
``nvlink=auto,rail=CUSTOM_NEAR_RAIL_3,rack=CUSTOM_NEAR_RACK_R7``."""),
    cfg.ListOpt('qat_services', default=[], help="""
Services of QAT cards of generation 4 and later, set at the start of
nova-compute if the card has no VFs: ``<services>`` for all cards, ``<PCI
address of the physical function>=<services>`` for one. Services are sym, asym,
dc, dcc and decomp, joined by ``;`` if the card supports the combination.
Example: ``sym;asym,0000:6d:00.0=dc``."""),
    cfg.ListOpt('ptp_devices', default=[], help="""
PCI addresses of further PTP hardware clocks for the driver timecard, which
always finds OCP time cards. The clock of a network card is refused. Example:
``0000:04:00.0``."""),
]

#: about bitstreams, profiles, requests and scheduling
_OTHER_OPTS = [
    cfg.StrOpt('bitstream_cache', default='$state_path/accel_bitstreams',
               help="""
Directory for bitstreams that nova-compute has downloaded from Glance."""),
    cfg.ListOpt('bitstream_owners', default=[], help="""
IDs of projects whose images are the operator's bitstreams, like all public
images. Placement shows only functions from the operator's images, and only
these stay in a region for the next server. If set, nova-compute downloads the
operator's images with the credentials of [service_user]: the images need not
be visible to tenants. Example: ``3f2c0b7a9d5e4c18a6b0d7e1f4932c85``."""),
    cfg.IntOpt('bitstream_cache_size', default=4096, min=0, help="""
Size limit of the bitstream cache in MiB. The least recently used bitstreams
are removed first, but none that a server of the host uses."""),
    cfg.IntOpt('bitstream_max_size', default=1024, min=1, help="""
Size limit of a bitstream in MiB. Larger images are refused."""),
    cfg.IntOpt('glance_timeout', default=60, min=1, help="""
Seconds to wait for each response of Glance."""),
    cfg.StrOpt('device_profiles', default='/etc/nova/device_profiles',
               help="""
A YAML file of device profiles, or a directory with such files (``*.yaml`` and
``*.yml``). nova-api reads it when a server is created or resized with a flavor
that has ``accel:device_profile``; a changed file takes effect at the next
request. If a file is malformed, nova-api logs its name and continues to use
its last valid profiles."""),
    cfg.BoolOpt('allow_snapshot_boot', default=False, help="""
Allow the creation of servers with accelerators from a snapshot of a server
with accelerators, although the software in the snapshot may expect another
function than that of the new flavor. Read by nova-api."""),
    cfg.FloatOpt('weight_multiplier', default=10.0, help="""
Multiplier of the weight of AcceleratorWeigher (loaded functions, free devices)
against Nova's own weights. ``accel_weight_multiplier`` in the metadata of an
aggregate takes precedence, as with Nova's own weighers. With zero the weigher
has no effect."""),
    cfg.StrOpt('packing', default='stack',
               choices=[('stack', 'from the fullest: whole hosts stay free'),
                        ('spread', 'from the emptiest')], help="""
Order of the hosts, and of the pools of a host, from which servers get devices.
Has no effect on requests for a function. With ``stack``, servers without
accelerators go to hosts without free accelerators first. This outweighs Nova's
own weights of RAM, CPU, disk and I/O, but not the requests of the flavor or a
server group of the tenant. ``accel:packing`` in a flavor takes precedence.
Read by nova-scheduler."""), ]

ALL_OPTS = [*_DEVICE_OPTS, *_OTHER_OPTS]

#: options that a capture contains; the others are about paths on the host, or
#: about OpenStack
CAPTURED_OPTS = [option for option in _DEVICE_OPTS
                 if option.name not in ('simulated_host', 'owner_trait')]

CONF = cfg.CONF
CONF.register_group(GROUP)
CONF.register_opts(ALL_OPTS, group=GROUP)


def register_novas() -> None:
    """Register options of Nova that defaults of nova_accel refer to.

    For commands and privileged processes, which do not load Nova's options.
    """
    # like nova.conf.netconf and nova.conf.paths
    for option in (cfg.StrOpt('host', default=socket.gethostname()),
                   cfg.StrOpt('pybasedir', default=_nova_directory()),
                   cfg.StrOpt('state_path', default='$pybasedir')):
        try:
            CONF.register_opt(option)
        except cfg.DuplicateOptError:
            pass


def _nova_directory() -> str:
    found = importlib.util.find_spec('nova')
    package = found.origin if found and found.origin else __file__
    return os.path.abspath(os.path.join(os.path.dirname(package), '..'))


def files() -> list[str]:
    """Return the configuration files that were read, in order."""
    try:
        found, directories = [*CONF.config_file], CONF.config_dir
    except cfg.NoSuchOptError:
        # no configuration was read
        return []
    for directory in directories:
        found += sorted(glob.glob(os.path.join(directory, '*.conf')))
    return found


def sections() -> dict[str, dict[str, list[str]]]:
    """Return the content of the configuration files, including unknown
    options.

    Names of sections are in lower case, except DEFAULT, because oslo.config
    ignores their case.

    :returns: section -> option -> values.
    """
    found: dict[str, dict[str, list[str]]] = {}
    for file in files():
        parsed: dict[str, dict[str, list[str]]] = {}
        cfg.ConfigParser(file, parsed).parse()
        for name, values in parsed.items():
            mine = found.setdefault(
                name if name == 'DEFAULT' else name.lower(), {})
            for option, texts in values.items():
                mine.setdefault(option, []).extend(texts)
    return found


def unknown() -> list[str]:
    """Return a sentence for each option in [accel] that does not exist, and for
    each section whose name is a misspelling of [accel]."""
    known = {name for option in ALL_OPTS
             for name in (option.name, option.dest)}
    there = sections()
    result = [
        f'nova.conf has {sorted(options.keys() & known)[0]} in a section '
        f'[{name}], which has no effect: write [accel].'
        for name, options in there.items()
        if name != 'accel' and options.keys() & known and _is_like(name)]
    for name in sorted(there.get('accel', {}).keys() - known):
        near = difflib.get_close_matches(name, sorted(known), 1)
        result.append(
            f'[accel] has {name!r}, which is not an option of nova_accel and '
            f'has no effect: '
            + (f'write {near[0]}.' if near else 'correct or remove it.'))
    return result


def _is_like(section: str) -> bool:
    """Return whether a section is probably a misspelling of [accel]."""
    return section not in CONF and bool(
        'accel' in section
        or difflib.get_close_matches(section, ['accel'], 1))


def malformed() -> list[str]:
    """Return a sentence for each option in [accel] with a malformed value."""
    return [f'[accel] {name} cannot be read ({why}): correct it.'
            for name, why in unreadable().items()]


def unreadable() -> dict[str, str]:
    """Return name -> error for each malformed option of [accel]."""
    found = {}
    for option in ALL_OPTS:
        try:
            getattr(CONF.accel, option.dest)
        except (cfg.Error, ValueError) as error:
            found[option.name] = why_invalid(error)
    return found


def why_invalid(error: Exception) -> str:
    """Return the part of an oslo.config error about what is wrong."""
    # ConfigSourceValueError (10.7) has no attributes; the part before this one
    # names the option, and prints internal objects
    return ' '.join(str(error).partition(' is not valid: ')[2].split()) or (
        ' '.join(str(error).split()))


def list_opts():
    """Return the options for oslo-config-generator."""
    return [(GROUP, ALL_OPTS)]
