package nftables

import (
	"context"
	"fmt"
	"slices"

	"nodeproxy/kernel/names"
	"nodeproxy/kernel/nft"
	"nodeproxy/plan"
)

// Watch calls suspect, with the reason, when another program has changed a table of ours. It returns when ctx ends, or with an error if
// it can't watch: then only a Sync that compares everything finds out.
func (b *Backend) Watch(ctx context.Context, suspect func(why string)) error {
	watch, err := nft.Watch(names.NFTables)
	if err != nil {
		return err
	}
	watch(ctx, func(f plan.Family, port uint32) {
		if !b.ports.has(port) && slices.Contains(b.Families(), f) {
			suspect(fmt.Sprintf("table %s %s of nftables was changed", nft.FamilyName(f), names.NFTables))
		}
	}, func(err error) {
		suspect(fmt.Sprintf("notifications of nftables were lost: %v", err))
	})
	return nil
}
