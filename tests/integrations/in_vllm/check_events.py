"""vLLM 0.33 decodes the KV events of the service with its own types."""

import msgspec
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

from forestage.core.kv_events import Blocks, HashForm, KvForm, encode_batch, write_event
from forestage.core.layout import Component, ModelLayout
from forestage.core.residency import Place, ResidencyEvent
from integrations.in_vllm.stage import chain

KEYS = chain(3)


def test_maps_are_read_as_vllm_writes_them() -> None:
    blocks = Blocks(ModelLayout("m", 64, (Component("kv", 16),)), KvForm.MAP, HashForm.VLLM)
    place = Place("m", "kv")
    events = [*(ResidencyEvent(True, place, key) for key in KEYS), ResidencyEvent(False, place, KEYS[0])]
    written = [write_event(KvForm.MAP, (), None), *(blocks.write(change) for change in blocks.take(events))]
    batch = msgspec.msgpack.decode(encode_batch(5.0, written, 1), type=KVEventBatch)
    hashes = [maybe_convert_block_hash(BlockHash(key)) for key in KEYS]
    stored = BlockStored(
        block_hashes=hashes,
        parent_block_hash=None,
        token_ids=[],
        block_size=64,
        lora_id=None,
        medium="CPU",
        lora_name=None,
        group_idx=0,
    )
    removed = BlockRemoved(block_hashes=hashes[:1], medium="CPU", group_idx=0)
    assert batch == KVEventBatch(ts=5.0, events=[AllBlocksCleared(), stored, removed], data_parallel_rank=1)
