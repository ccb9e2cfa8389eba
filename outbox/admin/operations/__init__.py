"""Acts on many messages at once: previewed, ordered, carried out by workers, shown, cancelled."""
