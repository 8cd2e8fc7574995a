package nftables

import (
	"context"
	"fmt"
	"slices"

	"nodeproxy/kernel/names"
	"nodeproxy/kernel/nft"
)

// Watch calls suspect, with the reason, when another program has changed a table of ours. It returns when ctx ends, or with an error if
// it can't watch: then only a full sync detects changes.
func (b *Backend) Watch(ctx context.Context, suspect func(why string)) error {
	watch, err := nft.Watch(names.NFTables)
	if err != nil {
		return err
	}
	watch(ctx, func(c nft.Change) {
		if !b.ports.has(c.Port) && slices.Contains(b.Families(), c.Family) {
			suspect(fmt.Sprintf("table %s %s of nftables was changed", nft.FamilyName(c.Family), names.NFTables))
		}
	}, func(err error) {
		suspect(fmt.Sprintf("notifications of nftables were lost: %v", err))
	})
	return nil
}
