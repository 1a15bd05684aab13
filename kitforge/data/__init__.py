"""From files to rows: readers, sampling order, prefetching; text, chat, tokenizers, tables and images."""
