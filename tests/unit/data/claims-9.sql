BEGIN TRANSACTION;
CREATE TABLE cards (
    number INTEGER PRIMARY KEY,
    address TEXT NOT NULL,
    serial TEXT NOT NULL,
    ids TEXT NOT NULL,
    placed INTEGER NOT NULL,
    record TEXT NOT NULL DEFAULT '[]',
    disabled TEXT,
    since TEXT NOT NULL DEFAULT '',
    unsettled TEXT NOT NULL DEFAULT '',
    but_for TEXT NOT NULL DEFAULT '',
    unclean TEXT NOT NULL DEFAULT '',
    device TEXT
);
INSERT INTO "cards" VALUES(1,'0000:5e:00.0','0011223344556677','',1,'[]',NULL,'','','','','{"address": "0000:5e:00.0", "type": "FPGA", "vendor": "INTEL", "product": "PAC_ARRIA10", "vendor_id": "8086", "product_id": "09c4", "driver": "dfl", "family": "ARRIA10", "numa_node": null, "bridges": ["pci0000:5e"], "memory": [["DDR", 8192]], "shell_id": "0x123000200000185", "regions": [{"index": 0, "region_type_uuid": "9926ab6d6c925a68aabca7d84c545738", "function_uuid": "11111111222243338444555555555555", "handles": [{"type": "PCI", "address": "0000:5e:00.1", "managed": true, "companions": [], "parent": null}], "bitstream_id": null, "function_name": null, "origin": "operator", "programmable": true, "guest_can_reprogram": false, "health": "ok", "reason": ""}], "handles": [], "company": [], "creatable": [], "traits": [], "state_traits": [], "earlier_traits": [], "subsystem": "8086:0000", "serial": "0011223344556677", "health": "ok", "reason": "", "record": []}');
INSERT INTO "cards" VALUES(2,'0000:02:00.0','S000003000','',1,'[["serial number", "S000003000"], ["firmware", "SIM1"], ["namespace", "1073741824x512+0"]]','it is hot','2026-11-22T02:17:43+00:00','','','','{"address": "0000:02:00.0", "type": "SSD", "vendor": "SAMSUNG", "product": "a824", "vendor_id": "144d", "product_id": "a824", "driver": "nvme", "family": null, "numa_node": null, "bridges": ["pci0000:02"], "memory": [], "shell_id": null, "regions": [], "handles": [{"type": "PCI", "address": "0000:02:00.0", "managed": true, "companions": [], "parent": null}], "company": [], "creatable": [], "traits": [], "state_traits": [], "earlier_traits": [], "subsystem": "144d:0000", "serial": "S000003000", "health": "ok", "reason": "", "record": [["serial number", "S000003000"], ["firmware", "SIM1"], ["namespace", "1073741824x512+0"]]}');
INSERT INTO "cards" VALUES(3,'0000:04:00.0','S000004000','',1,'[["serial number", "S000004000"], ["firmware", "SIM1"], ["namespace", "1073741824x512+0"]]',NULL,'','','','[["0000:04:00.0", "0000:04:00.0", "none"]]','{"address": "0000:04:00.0", "type": "SSD", "vendor": "SAMSUNG", "product": "a824", "vendor_id": "144d", "product_id": "a824", "driver": "nvme", "family": null, "numa_node": null, "bridges": ["pci0000:04"], "memory": [], "shell_id": null, "regions": [], "handles": [{"type": "PCI", "address": "0000:04:00.0", "managed": true, "companions": [], "parent": null}], "company": [], "creatable": [], "traits": [], "state_traits": [], "earlier_traits": [], "subsystem": "144d:0000", "serial": "S000004000", "health": "ok", "reason": "", "record": [["serial number", "S000004000"], ["firmware", "SIM1"], ["namespace", "1073741824x512+0"]]}');
INSERT INTO "cards" VALUES(4,'','S000002000','',0,'[["serial number", "S000002000"], ["firmware", "SIM1"], ["namespace", "1073741824x512+0"]]',NULL,'','returned','','',NULL);
CREATE TABLE claims (
    uuid TEXT PRIMARY KEY,
    instance_uuid TEXT NOT NULL,
    role TEXT NOT NULL,
    provider_uuid TEXT NOT NULL,
    resource_class TEXT NOT NULL,
    request_group TEXT NOT NULL,
    device_address TEXT NOT NULL,
    region_index INTEGER,
    handle_type TEXT NOT NULL,
    handle_address TEXT NOT NULL,
    handle TEXT NOT NULL,
    consumer_uuid TEXT NOT NULL,
    state TEXT NOT NULL,
    error TEXT NOT NULL,
    restore_function TEXT,
    restore_bitstream TEXT,
    created_type TEXT,
    prepared INTEGER NOT NULL,
    restore_origin TEXT,
    project_id TEXT,
    serial TEXT NOT NULL DEFAULT '',
    asked TEXT NOT NULL DEFAULT '',
    remembered TEXT NOT NULL DEFAULT '',
    ids TEXT NOT NULL DEFAULT '',
    operators_bitstream TEXT,
    since TEXT NOT NULL DEFAULT '',
    UNIQUE (handle_type, handle_address)
);
INSERT INTO "claims" VALUES('f84a56d5-7283-42c7-b380-4843499249cc','f0338553-7082-46fa-b538-7828be7059c7','current','628e3547-464e-58ab-9e6c-a514880512fa','CUSTOM_ACCELERATOR_FPGA','1','0000:5e:00.0',0,'PCI','0000:5e:00.1','{"type": "PCI", "address": "0000:5e:00.1", "managed": true, "companions": [], "parent": null}','f0338553-7082-46fa-b538-7828be7059c7','Bound','','11111111222243338444555555555555','a0a14668-f50f-4407-ab42-750c0633bf0e',NULL,1,'operator','demo','0011223344556677','{"keys": {}, "bitstream_id": null, "functions": ["11111111222243338444555555555555"]}','','8086:09c4 8086:0000','a0a14668-f50f-4407-ab42-750c0633bf0e','2026-11-24T06:54:54+00:00');
CREATE TABLE handovers (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    time TEXT NOT NULL,
    device TEXT NOT NULL,
    serial TEXT NOT NULL,
    handle TEXT NOT NULL,
    server TEXT NOT NULL,
    origin TEXT NOT NULL,
    method TEXT NOT NULL,
    before TEXT NOT NULL,
    after TEXT NOT NULL,
    result TEXT NOT NULL
);
INSERT INTO "handovers" VALUES(1,'2026-11-24T06:54:54+00:00','0000:04:00.0','S000004000','0000:04:00.0','e7b04682-9cde-4ebc-b46e-13c245c43c1c','','none','','','not cleaned');
INSERT INTO "handovers" VALUES(2,'2026-11-24T06:54:54+00:00','0000:02:00.0','S000002000','0000:02:00.0','7028ea8e-7f4f-4e72-806a-b4384e82d15a','','none','','','another card is in its place');
CREATE TABLE orders (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    verb TEXT NOT NULL,
    argument TEXT NOT NULL,
    since REAL NOT NULL,
    state TEXT NOT NULL,
    answer TEXT NOT NULL
);
CREATE TABLE pools (
    provider_uuid TEXT PRIMARY KEY,
    operators INTEGER NOT NULL,
    least INTEGER NOT NULL,
    most INTEGER NOT NULL
);
INSERT INTO "pools" VALUES('5b0f7a9e-54c1-5d0c-8f43-2f8a9d1c7e60',1,2,3);
CREATE TABLE regions (
    card INTEGER NOT NULL,
    region_index INTEGER NOT NULL,
    function_uuid TEXT,
    bitstream_id TEXT,
    function_name TEXT,
    content TEXT,
    origin TEXT,
    PRIMARY KEY (card, region_index)
);
INSERT INTO "regions" VALUES(1,0,'11111111222243338444555555555555','a0a14668-f50f-4407-ab42-750c0633bf0e',NULL,'sha512-bd2f142efc4c6417524189dfe0ff8b95b07a2628f447b07242cdfb218285c69e64f73c95b0617b6aa83e7d3432bd7f6e360c3fca8196f6c9e6ffd4fa0e6f185a','demo');
CREATE TABLE reserved (
    provider_uuid TEXT NOT NULL,
    resource_class TEXT NOT NULL,
    reserved INTEGER NOT NULL,
    PRIMARY KEY (provider_uuid, resource_class)
);
INSERT INTO "reserved" VALUES('c329ae99-cf3c-5f7b-ab35-f8c7fc9428b1','CUSTOM_ACCELERATOR_SSD',0);
INSERT INTO "reserved" VALUES('2d944f7c-b6e3-5317-8d50-39bce2727511','CUSTOM_ACCELERATOR_SSD',0);
CREATE TABLE waiting (
    handle_type TEXT NOT NULL,
    handle_address TEXT NOT NULL,
    device_address TEXT NOT NULL,
    region_index INTEGER,
    shown INTEGER NOT NULL,
    provider_uuid TEXT NOT NULL DEFAULT '',
    PRIMARY KEY (handle_type, handle_address)
);
INSERT INTO "waiting" VALUES('PCI','0000:65:00.0','0000:65:00.0',NULL,1,'5b0f7a9e-54c1-5d0c-8f43-2f8a9d1c7e60');
INSERT INTO "waiting" VALUES('PCI','0000:17:00.0','0000:17:00.0',NULL,0,'');
CREATE INDEX handovers_of_device ON handovers (device);
CREATE UNIQUE INDEX one_card_at_an_address ON cards (address) WHERE placed;
CREATE UNIQUE INDEX one_card_of_a_serial_number ON cards (serial) WHERE serial <> '';
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('handovers',2);
COMMIT;
PRAGMA user_version = 9;
