BEGIN TRANSACTION;
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
    UNIQUE (handle_type, handle_address)
);
INSERT INTO "claims" VALUES('0e1c3a52-7d64-4a0b-9f1e-000000000001','0e1c3a52-7d64-4a0b-9f1e-000000000101','current','0e1c3a52-7d64-4a0b-9f1e-000000000201','CUSTOM_ACCELERATOR_FPGA','1','0000:5e:00.0',0,'PCI','0000:5e:00.1','{"type": "PCI", "address": "0000:5e:00.1", "managed": true, "companions": [], "parent": null}','0e1c3a52-7d64-4a0b-9f1e-000000000101','Bound','',NULL,NULL,NULL,1,'operator','p','S1');
CREATE TABLE devices (
    address TEXT PRIMARY KEY,
    device TEXT NOT NULL
);
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
CREATE TABLE loaded (
    device_address TEXT NOT NULL,
    region_index INTEGER NOT NULL,
    function_uuid TEXT,
    bitstream_id TEXT,
    function_name TEXT,
    content TEXT,
    origin TEXT,
    PRIMARY KEY (device_address, region_index)
);
INSERT INTO "loaded" VALUES('0000:5e:00.0',0,NULL,NULL,NULL,NULL,NULL);
CREATE TABLE pools (
    provider_uuid TEXT PRIMARY KEY,
    operators INTEGER NOT NULL,
    least INTEGER NOT NULL,
    most INTEGER NOT NULL
);
INSERT INTO "pools" VALUES('p',1,2,3);
CREATE TABLE records (
    serial TEXT PRIMARY KEY,
    record TEXT NOT NULL
);
INSERT INTO "records" VALUES('S3','[["firmware", "1"]]');
CREATE TABLE reserved (
    provider_uuid TEXT NOT NULL,
    resource_class TEXT NOT NULL,
    reserved INTEGER NOT NULL,
    PRIMARY KEY (provider_uuid, resource_class)
);
CREATE TABLE unsettled (
    address TEXT NOT NULL,
    serial TEXT NOT NULL,
    PRIMARY KEY (address, serial)
);
INSERT INTO "unsettled" VALUES('','S2');
CREATE TABLE waiting (
    handle_type TEXT NOT NULL,
    handle_address TEXT NOT NULL,
    device_address TEXT NOT NULL,
    region_index INTEGER,
    shown INTEGER NOT NULL,
    provider_uuid TEXT NOT NULL DEFAULT '',
    PRIMARY KEY (handle_type, handle_address)
);
INSERT INTO "waiting" VALUES('PCI','0000:af:00.1','0000:af:00.0',NULL,0,'');
DELETE FROM "sqlite_sequence";
PRAGMA user_version = 3;
COMMIT;
