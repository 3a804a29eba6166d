# Licensed under the Apache License, Version 2.0. See LICENSE.
"""nova-accel import nova: translate Nova's PCI devices and vGPUs to [accel].

Nova's own code reads Nova's options and matches devices (nova.conf,
nova.pci.devspec and nova.pci.request). Drivers of nova_accel read the devices
twice: with the present options, and with the new options.
"""

from collections.abc import Iterator
import importlib.metadata
import json
import logging

# registers Nova's options, with Nova's defaults
import nova.conf  # noqa: F401
from nova import exception as nova_exception
from oslo_config import cfg
from oslo_utils import strutils

from nova_accel.cmd import cloud
from nova_accel.cmd import configuration
from nova_accel.cmd import imports
from nova_accel.cmd import ini
from nova_accel.cmd import nova_flavors
from nova_accel.cmd import nova_pci
from nova_accel import conf
from nova_accel import drivers
from nova_accel.drivers import rules
from nova_accel.drivers import vgpu
from nova_accel import exception
from nova_accel.host import pci
from nova_accel import inventory
from nova_accel.inventory import holds
from nova_accel.inventory import offers
from nova_accel import machine
from nova_accel import model
from nova_accel import naming
from nova_accel.store import claim_store

CONF = conf.CONF

#: names of these options of Nova that oslo.config accepts
_DEVICE_SPEC = {('pci', 'device_spec'), ('pci', 'passthrough_whitelist'),
                ('DEFAULT', 'pci_passthrough_whitelist')}
_ALIAS = {('pci', 'alias'), ('DEFAULT', 'pci_alias')}
_MDEV_TYPES = {('devices', 'enabled_mdev_types'),
               ('devices', 'enabled_vgpu_types')}
#: PCI base class -> type of a device that only the driver pci finds
_TYPES = {0x01: 'STORAGE', 0x02: 'NIC', 0x03: 'GPU', 0x04: 'MULTIMEDIA',
          0x10: 'CRYPTO', 0x12: 'AI'}
#: options that take several values in one line
_LISTS = ('enabled_drivers', 'vgpu_types', 'handover')
_OPTIONS = (*_LISTS, 'include_devices', 'exclude_devices', 'pci_devices')

#: the replacement of live_migratable
_LIVE = ('nova_accel detects which devices can migrate, and flavors set '
         'accel:live_migration=transparent')


class ImportNova(cloud.Asks, configuration.Reader):
    """Translate Nova's PCI devices and vGPUs of this host into [accel].

    Reads [pci] device_spec and alias, [devices] enabled_mdev_types with its
    sections [mdev_TYPE], and the devices of this host. Prints the new nova.conf
    and device profiles as a unified diff, and the new extra specs of flavors,
    and writes nothing. Options that cannot be translated stay unchanged; stderr
    names them, and the exit status is 1. With --flavors it reads the flavors of
    the cloud with your credentials, and prints the new extra specs of each
    flavor that requests these devices.
    """

    def get_parser(self, prog_name):
        parser = super().get_parser(prog_name)
        self.add_cloud_arguments(parser)
        parser.add_argument(
            '--flavors', action='store_true',
            help='read the flavors of the cloud, too (needs credentials)')
        return parser

    def take_action(self, parsed_args):
        configuration.read(parsed_args.config_file)
        flavors = (self.cloud(parsed_args).flavors()
                   if parsed_args.flavors or parsed_args.os_cloud else None)
        # warnings are part of the output
        logging.disable(logging.CRITICAL)
        try:
            found = Translation(machine.open_kernel(
                CONF.host, writes=False))
        finally:
            logging.disable(logging.NOTSET)
        self.status = int(bool(found.left_out))
        for file in found.files:
            self.app.stdout.writelines(file.diff())
        for profile in found.profiles:
            self.app.stdout.writelines(imports.diff(
                imports.path_of(profile['name']), imports.text_of(profile)))
        self.app.stdout.writelines(f'# {line}\n' for line in found.notes)
        if flavors is not None:
            told = list(nova_flavors.lines(flavors, found.replacements))
            self.app.stdout.write(
                '# Flavors of the cloud:\n' if told else
                '# No flavor of the cloud asks for PCI devices or vGPUs of '
                'Nova.\n')
            self.app.stdout.writelines(f'#   {line}\n' for line in told)
        self.app.stderr.writelines(f'{line}\n' for line in found.left_out)


class Translation:
    """The translation of all options of this host for Nova's devices."""

    def __init__(self, kernel):
        self.files = [ini.File(path) for path in conf.files()]
        #: device profiles, with the keys of a profile file
        self.profiles: list[dict] = []
        #: notes for the operator
        self.notes: list[str] = []
        #: sentences about options that are not translated
        self.left_out: list[str] = []
        self._kernel = kernel
        self._functions = dict(self._read_functions())
        #: options of [accel] -> added values
        self._new: dict[str, list[str]] = {
            name: [] for name in _OPTIONS}
        #: rules of include_devices that select the devices
        self._rules: list[str] = []
        #: addresses of devices that nova_accel takes over
        self._cards: set[str] = set()
        #: addresses of the VFs that Nova gives to servers
        self._vfs: set[str] = set()
        #: files from which an option is removed
        self._changed: list[ini.File] = []
        #: replacements for the requests of flavors
        self.replacements: list[nova_flavors.Replacement] = []
        try:
            self._translate()
        except (nova_exception.NovaException, cfg.Error) as error:
            raise exception.ConfigurationError(
                f'Nova does not accept its own options '
                f'({" ".join(str(error).split())}): correct them.'
            ) from error

    def _translate(self):
        if not (CONF.pci.device_spec or CONF.devices.enabled_mdev_types):
            self.notes.append('nova.conf has neither [pci] device_spec nor '
                              '[devices] enabled_mdev_types.')
            return
        self._seen, self._failed, _ = self._scan(
            enabled_drivers=[
                *CONF.accel.enabled_drivers, *sorted(
                    {point.name for point in importlib.metadata.entry_points(
                        group=drivers.NAMESPACE)}
                    - {'pci', *CONF.accel.enabled_drivers})],
            include_devices=['address=*'], exclude_devices=[], vgpu_types=[])
        types = self._vgpu_types()
        specs = self._specs()
        if not self._cards:
            return
        self.notes += [
            'Before you change nova.conf, move the servers that have these '
            'devices to other hosts.',
            'nova-accel check shows what else nova.conf needs.']
        self._leave_vfs()
        self._choose_rules()
        self._write()
        self._verify(specs)
        self._aliases(specs)
        self._profiles_of_types(types)
        self._tell_flavors()

    # The host

    def _read_functions(self) -> Iterator[tuple[str, nova_pci.Function]]:
        for address in self._kernel.listdir(pci.DEVICES):
            try:
                yield address, nova_pci.Function(
                    address, pci.identifier(self._kernel, address, 'vendor'),
                    pci.identifier(self._kernel, address, 'device'),
                    pci.class_code(self._kernel, address) >> 16,
                    pci.physical_function(self._kernel, address),
                    pci.can_have_vfs(self._kernel, address))
            except (OSError, ValueError):
                # the device disappeared meanwhile
                continue

    def _scan(self, **options,
              ) -> tuple[dict[str, model.Device], dict[str, str],
                         offers.Offers]:
        """Read the devices as nova-compute would with other options of
        [accel].

        :param options: options that replace those of nova.conf.
        :returns: devices by address, Inventory.failures(), and
            DeviceTable.offered().
        """
        for name, value in options.items():
            CONF.set_override(name, value, group='accel')
        try:
            found = inventory.Inventory(
                drivers.load(CONF.accel.enabled_drivers, self._kernel),
                claim_store.ClaimStore(claim_store.MEMORY), reads_serials=False)
            found.scanner.scan()
            # inside the block, because the drivers read the options
            offered = found.table.offered()
        finally:
            for name in options:
                CONF.clear_override(name, group='accel')
        return found.devices, found.failures(), offered

    # The files

    def _entries(self, names) -> list[tuple[ini.File, ini.Entry]]:
        return [(file, entry) for file in self.files for entry in file.entries
                if (entry.section, entry.key) in names]

    def _drop(self, file, entry, *values):
        """Remove an option from a file, or replace its values by these values.
        """
        if values:
            file.put(entry, *values)
        else:
            file.drop(entry)
        self._changed.append(file)

    def _leave(self, sentence):
        if sentence not in self.left_out:
            self.left_out.append(sentence)

    # [pci] device_spec

    def _specs(self) -> list[nova_pci.Spec]:
        found = []
        for file, entry in self._entries(_DEVICE_SPEC):
            items = _loaded(entry, '[pci] device_spec')
            several = isinstance(items, list)
            stay = []
            for words in items if several else [items]:
                spec = self._spec(words)
                found.append(spec)
                spec.moves = self._take(spec)
                if not spec.moves:
                    stay.append(words)
            if len(stay) < (len(items) if several else 1):
                self._drop(file, entry, *([json.dumps(stay)] if stay else []))
        return found

    def _spec(self, words) -> nova_pci.Spec:
        # importing it loads Nova, which takes seconds
        from nova.pci import devspec
        if not isinstance(words, dict):
            raise exception.ConfigurationError(
                f'[pci] device_spec has {json.dumps(words)[:60]}, which is '
                f'not a mapping: correct it.')
        text = json.dumps(words)
        if 'devname' in words:
            # without it, devspec would read the interfaces of this machine
            return nova_pci.Spec(text, words)
        spec = devspec.PciDeviceSpec(dict(words))
        return nova_pci.Spec(text, spec.tags, spec, [
            function for function in self._functions.values()
            if nova_pci.matches(spec, function)])

    def _take(self, spec: nova_pci.Spec) -> bool:
        """Translate a device specification if nova_accel can offer its
        devices.

        :returns: whether the specification was translated.
        """
        of = f'[pci] device_spec {spec.text}'
        if nova_pci.is_of_network(spec.tags):
            self.notes.append(f'{of} is for network interfaces: it stays.')
            return False
        if spec.spec is None:
            self._leave(f'{of} names a device by its network interface, and '
                        f'nova_accel needs a PCI address: it stays. Write '
                        f'"address" for "devname", or leave it to Nova.')
            return False
        if not spec.functions:
            self._leave(f'{of} matches no device of this host: it stays. Run '
                        f'this on a host that has one.')
            return False
        by_driver: dict[str, set[str]] = {}
        for function in spec.functions:
            by_driver.setdefault(self._driver_of(function.card),
                                 set()).add(function.card)
        problem = next(filter(None, (
            self._obstacle(spec, card)
            for cards in by_driver.values() for card in sorted(cards))), '')
        if problem:
            self._leave(f'{of} is not translated and stays: {problem}.')
            return False
        for driver, cards in sorted(by_driver.items()):
            self._take_cards(spec, driver, cards)
        self._vfs.update(f.address for f in spec.functions if f.pf)
        self._tags(spec, of, by_driver)
        return True

    def _driver_of(self, card) -> str:
        return self._seen[card].driver if card in self._seen else 'pci'

    def _obstacle(self, spec, card) -> str:
        """Return a clause with the reason why nova_accel cannot offer a card
        as Nova does. Return '' if it can."""
        device = self._seen.get(card)
        if card in self._failed:
            return f'{card} could not be examined ({self._failed[card]})'
        if device and device.creatable:
            return (f'{card} is divided into vGPUs whose types you have '
                    f'chosen, so name them in {vgpu.OPTION} by hand')
        vfs = set(pci.virtual_functions(self._kernel, card))
        if vfs and not any(f.address in vfs for f in spec.functions):
            return (f'it gives {card} as a whole, and nova_accel gives the '
                    f'VFs of a device that has them, so remove its VFs')
        if not strutils.bool_from_string(spec.tags.get('managed'),
                                         default=True):
            return (f'it has "managed": "no", and nova_accel has {card} '
                    f'bound to vfio-pci by libvirt')
        return ''

    def _take_cards(self, spec, driver, cards):
        texts = self._rules_for(nova_pci.pairs_of(spec.spec, {
            self._functions[card].product for card in cards}), cards)
        self._need(driver, cards, texts)
        if driver == 'pci':
            type_ = _TYPES.get(self._functions[min(cards)].kind, 'PCI')
            traits = sorted(t for t in nova_pci.traits(spec.tags.get('traits'))
                            if naming.is_custom(t))
            # rules that exist come first, and the first match applies
            self._add('pci_devices', *(
                f'{text} type={type_}' + (
                    f' traits={",".join(traits)}' if traits else '')
                for text in texts))

    def _rules_for(self, text: str | None, cards: set[str]) -> list[str]:
        """Return rules that match exactly these cards of the host.

        :param text: a rule to prefer, if it matches exactly these cards. If it
            does not, or is None, the result has a rule with the address of
            each card.
        """
        if text is not None:
            rule, = rules.parse('a rule', [text], rules.KEYS)
            if cards == {f.address for f in self._functions.values()
                         if not f.pf and rule.matches({
                             'address': f.address, 'vendor': f.vendor,
                             'product': f.product})}:
                return [text]
        return [f'address={card}' for card in sorted(cards)]

    def _need(self, driver, cards, texts):
        self._cards.update(cards)
        self._rules += [text for text in texts if text not in self._rules]
        if driver not in CONF.accel.enabled_drivers:
            self._add('enabled_drivers', driver)

    def _add(self, option, *values):
        there = [*CONF.accel[option], *self._new[option]]
        self._new[option] += [v for v in values if v not in there]

    def _leave_vfs(self):
        """Exclude VFs that Nova does not give to servers, if other VFs of the
        same card move to nova_accel."""
        for card in sorted({self._functions[vf].card for vf in self._vfs}):
            self._add('exclude_devices', *(
                f'address={vf}' for vf
                in pci.virtual_functions(self._kernel, card)
                if vf not in self._vfs))

    def _tags(self, spec, of, by_driver):
        """Translate tags of a device specification into options of [accel],
        and note tags that have no translation."""
        cards = sorted(set().union(*by_driver.values()))
        if strutils.bool_from_string(spec.tags.get('one_time_use')):
            self._add('handover', *(f'{card}=operator' for card in cards))
        if strutils.bool_from_string(spec.tags.get('live_migratable')):
            self._leave(f'"live_migratable" of {of} is not translated: '
                        f'{_LIVE}.')
        untranslated = sorted(
            t for t in nova_pci.traits(spec.tags.get('traits'))
            if by_driver.keys() != {'pci'} or not naming.is_custom(t))
        if untranslated:
            self._leave(f'The traits {", ".join(untranslated)} of {of} are '
                        f'not translated: set them on the providers of '
                        f'nova_accel with "openstack resource provider trait '
                        f'set", where they stay.')

    # [devices] enabled_mdev_types

    def _vgpu_types(self) -> dict[str, set[str]]:
        """Translate the options of Nova's vGPUs.

        :returns: translated type -> addresses of the GPUs that have it.
        """
        if not CONF.devices.enabled_mdev_types:
            return {}
        # importing it loads Nova, which takes seconds
        from nova_accel.virt import conflicts
        options = conflicts.of_options(self._kernel)
        parents: dict[str, set[str]] = {}
        for parent in self._kernel.listdir(vgpu.MDEV_BUS) if (
                self._kernel.exists(vgpu.MDEV_BUS)) else ():
            type_ = options.vgpu_type(parent)
            if type_ and self._kernel.exists(f'{vgpu.MDEV_BUS}/{parent}/'
                                             f'mdev_supported_types/{type_}'):
                parents.setdefault(type_, set()).add(parent)
        found = {}
        for name in CONF.devices.enabled_mdev_types:
            gpus = {self._card_of(parent) for parent in parents.get(name, ())}
            of = f'[devices] enabled_mdev_types has {name}'
            if not gpus:
                self._leave(f'{of}, which Nova creates on no device of this '
                            f'host: it stays. Run this on a host that has '
                            f'one.')
            elif not all(self._can_create(gpu, name) for gpu in gpus):
                self._leave(f'{of}, which is not a type of vGPUs: it stays.')
            else:
                found[name] = gpus
                self._take_type(name, gpus, vgpu.title(
                    self._kernel, min(parents[name]), name))
                self._vfs.update(p for p in parents[name]
                                 if p in self._functions
                                 and self._functions[p].pf)
        self._remove_types(found)
        return found

    def _card_of(self, parent) -> str:
        function = self._functions.get(parent)
        return function.card if function else parent

    def _can_create(self, gpu, name):
        return gpu in self._seen and any(
            t.kernel_name == name for t in self._seen[gpu].creatable)

    def _take_type(self, name, gpus, title):
        section = f'mdev_{name}'
        self._add('vgpu_types', *(
            [f'{gpu}={title}' for gpu in sorted(gpus)]
            if CONF[section].device_addresses else [title]))
        known = gpus & self._functions.keys()
        text = None
        if known:
            first = self._functions[min(known)]
            text = f'vendor={first.vendor} product={first.product}'
        self._need('vgpu', gpus, self._rules_for(text, gpus))
        for gpu in sorted(gpus):
            others = [item for item in self._new['vgpu_types']
                      if item.startswith(f'{gpu}=')]
            if len(others) > 1:
                self._leave(f'Nova creates one type of vGPUs on some VFs of '
                            f'{gpu} and another on others: nova_accel offers '
                            f'both types on any VF, so reserve in Placement '
                            f'what you do not want to be given.')
        if CONF[section].max_instances:
            self._leave(f'[{section}] max_instances is not translated: the '
                        f'GPU reports the number; to offer fewer, raise '
                        f'"reserved" of its provider.')

    def _remove_types(self, found):
        for file, entry in self._entries(_MDEV_TYPES):
            names = [name.strip() for name in entry.value.split(',')]
            stay = [name for name in names if name not in found]
            if len(stay) < len(names):
                self._drop(file, entry, *([','.join(stay)] if stay else []))
        sections = {f'{kind}_{name}'.lower() for name in found
                    for kind in ('mdev', 'vgpu')}
        for file in self.files:
            for entry in file.entries:
                if entry.section in sections:
                    file.drop(entry)

    # [accel]

    def _choose_rules(self):
        """Add rules to include_devices, if the translated devices need rules.

        Without rules, the drivers gpu and nvme offer nothing, and other
        drivers offer all devices that they find. As soon as a rule names a
        device of a driver, the driver offers only devices with a rule. Hence
        the devices that the driver already offers need rules, too.
        """
        enabled = CONF.accel.enabled_drivers
        loaded = drivers.load({self._driver_of(card) for card in self._cards},
                              self._kernel)
        more = any(device.driver in self._new['enabled_drivers']
                   and address not in self._cards
                   for address, device in self._seen.items())
        if not (CONF.accel.include_devices or more
                or any(driver.NEEDS_RULE for driver in loaded.values())):
            return
        known = rules.DeviceRules()
        for address, device in self._seen.items():
            if (device.driver in loaded.keys() & enabled
                    and not loaded[device.driver].NEEDS_RULE
                    and address not in self._cards
                    and not known.includes(device)):
                self._add('include_devices', (
                    f'vendor={device.vendor_id} product={device.product_id}')
                    if device.vendor_id else f'address={address}')
        self._add('include_devices', *self._rules)

    def _write(self):
        target = next((file for file in reversed(self.files)
                       if file.has('accel')), self._changed[0])
        for option, values in self._new.items():
            there = self._entries({('accel', option)})
            if not values:
                continue
            if option in _LISTS:
                values = [','.join([*CONF.accel[option], *values])]
                for file, entry in there[-1:]:
                    file.put(entry, *values)
                    break
                else:
                    target.add('accel', option, values)
            else:
                target.add('accel', option, values)

    def _verify(self, specs):
        self._after, _, offered = self._scan(**{
            option: [*CONF.accel[option], *values]
            for option, values in self._new.items()})
        for card in sorted(self._cards):
            device = self._after.get(card)
            if device is None:
                self._leave(f'{card} would not be found by nova_accel: '
                            f'check [accel] exclude_devices, and see '
                            f'nova-accel discover.')
            elif withheld := offered.withheld_by((card, None)):
                self._leave(f'{card} would not be given to servers by '
                            f'nova_accel, because {holds.reasons(withheld)}.')
            elif not device.all_handles:
                self._leave(f'{card} would not be given to servers by '
                            f'nova_accel: see nova-accel discover.')
            for spec in specs:
                both = sorted({f.address for f in spec.functions}
                              & device.functions()
                              ) if device and not spec.moves else ()
                if both:
                    self._leave(f'{both[0]} would be of nova_accel and is '
                                f'also matched by [pci] device_spec '
                                f'{spec.text}, which stays: narrow that, or '
                                f'nova-compute does not start.')

    # [pci] alias, flavors and profiles

    def _aliases(self, specs):
        if not CONF.pci.alias:
            return
        # importing it loads Nova, which takes seconds
        from nova.pci import request
        # a private name in Nova 31.0, a public one in 31.3
        read = getattr(request, 'get_alias_from_config', None) or getattr(
            request, '_get_alias_from_config')
        try:
            aliases = read()
        except nova_exception.NovaException as error:
            self._leave(f'[pci] alias is not translated and stays, because '
                        f'Nova does not accept it '
                        f'({" ".join(str(error).split())}): correct it.')
            return
        gone = {name for name, (policy, wanted) in aliases.items()
                if self._alias(name, policy, wanted, specs)}
        for file, entry in self._entries(_ALIAS):
            name = _loaded(entry, '[pci] alias')['name'].strip()
            if name in gone:
                self._drop(file, entry)
        if gone:
            self.notes.append(
                'On hosts of nova-api, and of nova-computes with devices of '
                'Nova, the aliases stay until no flavor and no server has '
                'them.')

    def _alias(self, name, policy, wanted, specs) -> bool:
        """Create a profile from an alias, if devices of the alias move to
        nova_accel.

        :returns: whether the alias can be removed, because the profile
            replaces it.
        """
        moved: set[str] = set()
        left: set[str] = set()
        given = set()
        for spec, function in self._specified(specs):
            if any(nova_pci.asks_for(w, spec, function) for w in wanted):
                (moved if spec.moves else left).add(function.card)
                given.add(function.address)
        of = f'[pci] alias {name}'
        if not moved:
            if left:
                self.notes.append(f'{of} is for devices that stay with Nova: '
                                  f'it stays.')
            else:
                self._leave(f'{of} asks for no device of this host: it stays. '
                            f'{self._way_to_match(wanted, specs)}')
            return False
        problem = ''
        if left:
            problem = (f'{min(left)} stays with Nova and {min(moved)} does '
                       f'not: make it two')
        elif not imports.is_name(name):
            problem = 'a profile cannot have its name: rename it'
        elif any(device.handles and not given & device.functions()
                 for device in map(self._after.get, moved) if device):
            problem = 'it requests whole devices, and only VFs are offered'
        group = None if problem else self._group(moved)
        if not group:
            self._leave(
                f'{of} is not translated and stays: ' + (problem or (
                    'no trait distinguishes its devices from others here'))
                + '.')
            return False
        profile: dict = {'name': name, 'groups': [group]}
        if policy == 'required':
            profile['accel:numa_affinity'] = 'required'
        elif policy == 'socket':
            self._leave(f'"numa_policy" socket of {of} is not translated: '
                        f'accel:numa_affinity is preferred, required or none.')
        if any(strutils.bool_from_string(w.get('live_migratable'))
               for w in wanted):
            self._leave(f'"live_migratable" of {of} is not translated: '
                        f'{_LIVE}.')
        self._profile(profile, alias=name)
        return True

    def _specified(self, specs) -> Iterator[tuple[
            nova_pci.Spec, nova_pci.Function]]:
        """Yield (specification, function) for each function with a
        specification that matches. As in Nova, the first such specification
        counts."""
        for function in self._functions.values():
            for spec in specs:
                if function in spec.functions:
                    yield spec, function
                    break

    def _way_to_match(self, wanted, specs) -> str:
        """Return the remedy for an alias that matches no function."""
        types = {function.address: (w['dev_type'], function.type)
                 for spec, function in self._specified(specs) for w in wanted
                 if nova_pci.is_like(w, spec, function)}
        if not types:
            return 'Run this on a host that has one.'
        address, (asked, actual) = min(types.items())
        return (f'Its device_type is {asked}, and Nova finds {address} as '
                f'{actual}: correct it, and run this again.')

    def _group(self, cards: set[str]) -> dict[str, str] | None:
        """Return a request group that exactly these devices of the host
        satisfy. Return None if no trait distinguishes them from other devices.
        """
        devices = [self._after[card] for card in cards if card in self._after]
        types = {device.type for device in devices}
        if len(types) != 1 or len(devices) < len(cards):
            return None
        type_, = types
        common = set.intersection(*map(naming.device_traits, devices))
        for address, device in self._after.items():
            if address not in cards and device.type == type_:
                common -= naming.device_traits(device)
        common.discard(CONF.accel.owner_trait)
        if not common:
            return None
        products = {naming.device_trait(type_, d.vendor, d.product, d.address)
                    for d in devices}
        trait = min(common, key=lambda t: (t not in products, -len(t), t))
        return {f'resources:{naming.resource_class(type_)}': '1',
                f'trait:{trait}': 'required'}

    def _profiles_of_types(self, types):
        for name, gpus in types.items():
            traits: dict[str, str] = {}
            for gpu in sorted(gpus & self._after.keys()):
                for made in self._after[gpu].creatable:
                    if made.kernel_name == name:
                        traits.setdefault(made.trait, gpu)
            for trait, gpu in traits.items():
                called = name if len(traits) == 1 else (
                    f'{name}-{self._after[gpu].product}')
                self._profile({
                    'name': called, 'groups': [{
                        f'resources:{naming.resource_class("VGPU")}': '1',
                        f'trait:{trait}': 'required'}]},
                    resource_class=CONF[f'mdev_{name}'].mdev_class)

    def _profile(self, profile, alias=None, resource_class=None):
        try:
            imports.text_of(profile)
        except exception.InvalidProfile as error:
            self._leave(str(error))
            return
        self.profiles.append(profile)
        self.replacements.append(nova_flavors.Replacement(
            alias, resource_class, profile))

    def _tell_flavors(self):
        if self.replacements:
            self.notes.append('Flavors, in place of what they ask of Nova:')
        for offer in self.replacements:
            self.notes += [
                f'  {offer.asked}1  ->  {offer.profile_spec()}',
                f'  {offer.asked}N  ->  '
                f'{" ".join(offer.group_specs("1", "N"))}']


def _loaded(entry, option):
    try:
        return json.loads(entry.value)
    except ValueError as error:
        raise exception.ConfigurationError(
            f'{option} has {entry.value[:60]!r}, which is not JSON: correct '
            f'it.') from error
