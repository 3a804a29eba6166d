# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Name GPUs, for traits and pools.

Names are never removed from the table, because flavors and images request them.
Sources: the PCI ID repository of 2026-08-22; for products that differ only by
subsystem, the product list of NVIDIA's driver. ``python -m tests.products
FILE`` compares the table with a pci.ids file and shows missing products.
"""

#: vendor -> family -> product -> device ids
_NAMES = {
    '10de': {
        'PASCAL': {
            'TESLA_P4': '1bb3', 'TESLA_P6': '1bb4', 'TESLA_P10': '1b39',
            'TESLA_P40': '1b38', 'TESLA_P100': '15f7 15f8 15f9'},
        'VOLTA': {
            'TESLA_V100': '1db1 1db3 1db4 1db5 1db6 1db8 1df5',
            'TESLA_V100S': '1df6'},
        'TURING': {
            'TESLA_T4': '1eb8', 'T4G': '1eb4', 'TESLA_T10': '1e35 1e37',
            'TESLA_T40': '1e38'},
        'AMPERE': {
            'A100': '20b0 20b1 20b2 20b3 20b5 20f1', 'A100X': '20b8',
            'A30': '20b7', 'A30X': '20b9', 'A800': '20bd 20f3 20f5 20f6',
            'AX800': '20fd', 'A40': '2235', 'A10': '2236', 'A10G': '2237',
            'A10M': '2238', 'RTX_A6000': '2230', 'RTX_A5000': '2231',
            'RTX_A4500': '2232', 'RTX_A5500': '2233'},
        'ADA': {
            'L40': '26b5', 'L40_CNX': '26f5', 'L40G': '26b8',
            'L40S': '26b9', 'L30': '26bb',
            'L20': '26b7 26ba', 'L16': '27b7', 'L4': '27b8', 'L2': '27b6',
            'RTX_6000_ADA': '26b1', 'RTX_5000_ADA': '26b2',
            'RTX_5880_ADA': '26b3'},
        'HOPPER': {
            'H100': '2330 2331 2336 2337 2338 2339 233d', 'H100L': '2321',
            'H100_CNX': '2313', 'H200': '2335', 'H200_NVL': '233b',
            'H800': '2322 2324', 'H800L': '233a', 'H20': '2329 232c',
            'H20B': '2328', 'H20_NVL16': '230c 230e', 'GH200': '2342 2348'},
        'BLACKWELL': {
            'B100': '2920 29bc', 'B200': '2901 2909', 'B300': '3182',
            'GB200': '2941', 'GB300': '31a1 31c2 31c3', 'GB10': '2e12',
            'RTX_PRO_6000': '2bb1 2bb5', 'RTX_PRO_6000D': '2bb2',
            'RTX_6000D': '2bb9', 'RTX_PRO_5000': '2bb3',
            'RTX_PRO_4500': '2c31 2c3a', 'RTX_PRO_4000': '2c33 2c34'},
    },
    '1002': {
        'INSTINCT': {
            'MI25': '6860', 'MI50': '66a1', 'MI60': '66a0',
            'MI100': '738c 738e', 'MI210': '740f', 'MI250': '740c',
            'MI250X': '7408', 'MI300A': '74a0', 'MI300X': '74a1',
            'MI300X_HF': '74a9 74bd', 'MI308X': '74a2', 'MI325X': '74a5',
            'MI350P': '75a8', 'MI350X': '75a0', 'MI355X': '75a3'},
        'RADEON_PRO': {
            'V340': '6864', 'V520': '7360 7362', 'V620': '73a1',
            'V710': '7460 7461', 'W7900': '7448 744a 744b',
            'W7800': '7449 745e', 'R9700': '7551'},
    },
    '8086': {
        'FLEX': {
            'FLEX_140': '56c1', 'FLEX_170': '56c0', 'FLEX_170V': '56c2'},
        'MAX': {
            'MAX_1100': '0bd9 0bda 0bdb', 'MAX_1100C': '0b6e',
            'MAX_1350': '0bd7 0bd8', 'MAX_1450': '0b69',
            'MAX_1550': '0bd5 0bd6', 'MAX_1550VG': '0bd4'},
        'ARC_PRO': {
            'ARC_PRO_A40': '56b1', 'ARC_PRO_A60': '56b3',
            'ARC_PRO_B50': 'e212', 'ARC_PRO_B60': 'e211',
            'ARC_PRO_B65': 'e222', 'ARC_PRO_B70': 'e223'},
        'SERVER_GPU': {'SG1': '4907'},
    },
}
#: (vendor, device) -> product, family
PRODUCTS: dict[tuple[str, ...], tuple[str, str]] = {
    (vendor, device): (product, family)
    for vendor, families in _NAMES.items()
    for family, products in families.items()
    for product, devices in products.items() for device in devices.split()}
#: (vendor, device, subsystem) -> product, family, if a device id has two names
BOARDS: dict[tuple[str, ...], tuple[str, str]] = {
    ('10de', '25b6', '10de:14a9'): ('A16', 'AMPERE'),
    ('10de', '25b6', '10de:157e'): ('A2', 'AMPERE'),
}


def name(vendor: str, device: str, subsystem: str) -> tuple[str, str | None]:
    """Return product and family of a GPU. For an unknown product, return the
    device id and None.

    :param vendor: PCI vendor id, four hex digits.
    :param device: PCI device id, four hex digits.
    :param subsystem: the result of pci.subsystem().
    """
    for names, key in ((BOARDS, (vendor, device, subsystem)),
                       (PRODUCTS, (vendor, device))):
        if key in names:
            return names[key]
    return device, None
