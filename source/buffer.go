package source

import "sync"

// Buffer is a Sink that keeps batches until PassTo names another one. It does not keep objects that are gone, so it does not grow
// however long that takes.
type Buffer struct {
	mu     sync.Mutex
	kept   Batch
	next   Sink
	synced chan struct{} // closed once everything has been delivered; nil until Synced is called
	all    bool          // everything has been delivered
}

// Synced returns a channel that is closed once the source has delivered everything that existed when it started.
func (b *Buffer) Synced() <-chan struct{} {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.synced == nil {
		b.synced = make(chan struct{})
		if b.all {
			close(b.synced)
		}
	}
	return b.synced
}

// Apply implements Sink.
func (b *Buffer) Apply(batch Batch) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if batch.Synced && !b.all {
		b.all = true
		if b.synced != nil {
			close(b.synced)
		}
	}
	if b.next != nil {
		b.next.Apply(batch)
		return
	}
	b.kept.Merge(batch)
	forget(b.kept.Services, batch.Services)
	forget(b.kept.EndpointSlices, batch.EndpointSlices)
	forget(b.kept.ServiceCIDRs, batch.ServiceCIDRs)
}

// PassTo passes the kept objects to next as one batch, and from then on each batch as it arrives.
func (b *Buffer) PassTo(next Sink) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.next = next
	if !b.kept.Empty() {
		next.Apply(b.kept)
	}
	b.kept = Batch{}
}

// forget removes from kept the objects that are gone: next never knew them.
func forget[K comparable, V any](kept, batch map[K]*V) {
	for k, v := range batch {
		if v == nil {
			delete(kept, k)
		}
	}
}
