// Receive orders by RocketMQ's official Node client: `node consumer.js ADDRESS [GROUP]`.
//
// It prints, such as: shipping got o-1 (attempt 1)
'use strict';
const { PushConsumer, FilterExpression, ConsumeResult } = require('rocketmq-client-nodejs');

async function main() {
  const [ endpoints, consumerGroup = 'shipping' ] = process.argv.slice(2);
  const consumer = new PushConsumer({
    endpoints,
    consumerGroup,
    namespace: '',
    subscriptions: new Map([ [ 'orders', new FilterExpression('*') ] ]),
    messageListener: {
      // What isn't a success comes again; the server renews the message's lease meanwhile.
      async consume(message) {
        console.log(`${consumerGroup} got ${message.body} (attempt ${message.deliveryAttempt})`);
        return ConsumeResult.SUCCESS;
      },
    },
  });
  await consumer.startup();
  for (const signal of [ 'SIGINT', 'SIGTERM' ]) {
    process.once(signal, async () => {
      await consumer.shutdown();
      process.exit(0);
    });
  }
}

main().catch(error => {
  console.error(error);
  process.exit(1);
});
