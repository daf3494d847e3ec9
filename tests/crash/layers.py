"""All layers, in the order in which they are run and told."""

from . import damage, errors, failed_sync, killing, libc, portable, properties, surroundings
from .layer import Layer

LAYERS: dict[str, Layer] = {
    layer.name: layer
    for layer in (
        portable.STORY,
        portable.LAYER,
        portable.RECOVERY,
        libc.LAYER,
        failed_sync.LAYER,
        killing.LAYER,
        errors.LAYER,
        properties.LAYER,
        damage.LAYER,
        surroundings.LAYER,
    )
}
